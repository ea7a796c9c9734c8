"""Rules in Keras 3: an optimizer for `model.compile`, on the backends JAX and torch."""

from importlib.util import find_spec

from rulec.errors import BackendUnavailable
from rulec.extras import needing

with needing("rulec.keras", "keras"):
    try:
        import keras  # noqa: F401
    except ModuleNotFoundError as error:
        if find_spec("keras") is None:
            raise
        raise BackendUnavailable(
            f"Keras runs on {error.name} here, which is not installed, and rulec.keras on jax and torch: set "
            f"KERAS_BACKEND to one of them before keras is imported"
        ) from None

from rulec.keras.axes import keras_axes, keras_tags
from rulec.keras.optimizer import RuleOptimizer, optimizer

__all__ = ["RuleOptimizer", "keras_axes", "keras_tags", "optimizer"]
