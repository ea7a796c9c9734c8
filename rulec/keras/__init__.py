"""Rules in Keras 3: an optimizer for `model.compile`, on the backends JAX and torch."""

from rulec.extras import needing

with needing("rulec.keras", "keras"):
    import keras  # noqa: F401

from rulec.keras.axes import keras_axes, keras_tags
from rulec.keras.optimizer import RuleOptimizer, optimizer

__all__ = ["RuleOptimizer", "keras_axes", "keras_tags", "optimizer"]
