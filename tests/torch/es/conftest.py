"""Small models are evaluated by one thread, as in the tests of eager updates."""

from tests.torch.eager.conftest import one_thread

__all__ = ["one_thread"]
