"""The arrays of one tensor for a stage: in their own shape, or as matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rulec.compiler.ir import Axes
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError, TensorError


class TensorViews:
    """A parameter and its states, and their matrices under `view`; None where no stage sees matrices."""

    def __init__(self, namespace: Any, arrays: Mapping[str, Any], view: MatrixView | None) -> None:
        self.namespace, self.arrays, self.view = namespace, arrays, view
        self._matrices: dict[str, Any] = {}

    def bound(self, name: str, viewed: bool) -> Any:
        """A bound array, or its matrices."""
        if not viewed:
            return self.arrays[name]
        if name not in self._matrices:
            self._matrices[name] = self.matrices(self.arrays[name])
        return self._matrices[name]

    def passed(self, array: Any, viewed: bool) -> Any:
        """An array of a call, of the parameter's shape, or its matrices."""
        return self.matrices(array) if viewed else array

    def vector(self, array: Any, axes: Axes, viewed: bool) -> Any:
        """A vector in a shape that broadcasts with the parameter's."""
        if axes.elementwise:
            return self.matrices(array) if viewed else self.namespace.reshape(array, self.arrays["p"].shape)
        view = self._view()
        sizes = {"b": view.batch, "i": view.rows, "j": view.cols}
        return self.namespace.reshape(array, tuple(sizes[c] if c in axes.letters else 1 for c in "bij"))

    def matrices(self, array: Any) -> Any:
        """`array` as `(batch, rows, cols)`, in the same memory; TensorError where this is impossible."""
        view, same_memory = self._view(), {"copy": False}
        if self.namespace is np:
            # NumPy has `copy` from 2.1 on only.
            same_memory = {}
            if not array.flags.c_contiguous:
                raise TensorError(f"an array of shape {array.shape} is not contiguous: pass np.ascontiguousarray of it")
        sides = (view.cols, view.rows) if view.transposed else (view.rows, view.cols)
        matrices = self.namespace.reshape(array, (view.batch, *sides), **same_memory)
        return self.namespace.permute_dims(matrices, (0, 2, 1)) if view.transposed else matrices

    def _view(self) -> MatrixView:
        if self.view is None:
            raise InternalError("a stage that sees tensors as matrices was bound without their views")
        return self.view
