"""Launches whose gradients are products: of which kernel they are, and how they are run as any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from rulec.backend.product import Product
from rulec.compiler.ir import Program
from rulec.errors import BackendUnsupported
from rulec.runtime.bucket import Version
from rulec.runtime.launch import Launch
from rulec.torch.eager.epilogue_tiles import TiledCall
from rulec.torch.tensors import dtype_name

#: How a product becomes an update: in one kernel where the backend has one, tile by tile, or as is fastest there.
Way = Literal["auto", "kernel", "tiles"]

#: Versions of programs whose calls are remembered.
_REMEMBERED = 64


def takes_products(program: Program) -> bool:
    """Whether a program's update can be made tile by tile: of one elementwise stage of gradient, parameter, states."""
    return program.elementwise and program.skip is None and not program.rule.inputs


class ProductCalls:
    """The calls of kernels for gradients that are products, bound to the tensors of buckets."""

    def __init__(self, way: Way = "auto") -> None:
        self._way = way
        self._found: dict[Any, tuple[Version, Any, Version]] = {}

    def give(self, launch: Launch, product: Product) -> int:
        """Has a launch of one matrix make the gradient itself, from its factors. Nothing is run yet.

        The bytes of the gradient that there are at once, then: of a tile, or none.
        """
        launch.version = self._version(launch, dtype_name(product.inputs.dtype))
        launch.grads = [product]
        call = launch.version.call
        return call.tile_bytes(product) if isinstance(call, TiledCall) else 0

    def _version(self, launch: Launch, factors: str) -> Version:
        """The same version of the program, with another call."""
        version = launch.version
        key = id(version), factors
        found = self._found.get(key)
        # Bound again where the bucket's own call was: tensors have moved, or there are more of them.
        if found is None or found[1] is not version.call:
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            made = replace(version, call=self._bound(launch, factors))
            found = self._found[key] = (version, version.call, made)
        return found[2]

    def _bound(self, launch: Launch, factors: str) -> Any:
        version, bucket = launch.version, launch.part.bucket
        kernel = self._kernel(version, bucket.backend, factors)
        if kernel is not None:
            return kernel.bind(bucket.params, bucket.states)
        return TiledCall(version.kernel, bucket.params, bucket.states, version.layout.dtype("g"))

    def _kernel(self, version: Version, backend: Any, factors: str) -> Any:
        """The backend's kernel that makes the product; None where tiles are taken."""
        if self._way == "tiles" or not hasattr(backend, "build_epilogue"):
            return None
        if self._way == "auto" and factors == "float32":
            return None  # products of float32 in full are faster by the library
        try:
            source = backend.emit_epilogue(version.program, version.layout, factors)
        except BackendUnsupported:
            return None
        return backend.build_epilogue(version.program, version.layout, factors, source)
