"""Launches whose gradients are products, or made by rows: their kernels, and calls like those of any other launch."""

from __future__ import annotations

from typing import Any, Literal

from rulec.backend.product import GradientRows, Product
from rulec.errors import BackendUnsupported
from rulec.runtime.bucket import Version
from rulec.runtime.estimate import OtherCalls
from rulec.runtime.launch import Launch
from rulec.torch.eager.epilogue_tiles import TiledCall
from rulec.torch.tensors import dtype_name

#: How a product becomes an update: in one kernel where the backend has one, tile by tile, or as is fastest there.
Way = Literal["auto", "kernel", "tiles"]


class ProductCalls:
    """The calls of kernels for gradients that are products, or made by rows, bound to the tensors of buckets."""

    def __init__(self, way: Way = "auto") -> None:
        self._way = way
        self._calls = OtherCalls()

    def give(self, launch: Launch, gradient: Product | GradientRows) -> int:
        """Has a launch of one tensor make the gradient itself. Nothing is run yet.

        The bytes of the gradient that there are at once, then: of a tile, or none.
        """
        factors = dtype_name(gradient.inputs.dtype) if isinstance(gradient, Product) else ""
        call = self._calls.give(launch, factors, lambda: self._bound(launch, factors))
        launch.grads = [gradient]
        position = launch.part.positions[0] if launch.part.positions else 0
        return call.tile_bytes(position, gradient) if isinstance(call, TiledCall) else 0

    def _bound(self, launch: Launch, factors: str) -> Any:
        """A call for products of factors of a dtype, or for gradients that are made by rows."""
        version, bucket = launch.version, launch.part.bucket
        kernel = self._kernel(version, bucket.backend, factors) if factors else None
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
