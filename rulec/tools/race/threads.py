"""One thread for NumPy's products: the products of a race are small, and waiting threads only cost time."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def one_thread() -> AbstractContextManager[Any]:
    """A context with one thread for each product; does nothing where threadpoolctl is not installed."""
    control = _control()
    return nullcontext() if control is None else control.limit(limits=1)


@functools.cache
def _control() -> Any:
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController().select(user_api="blas")
