"""Where the C source looks for the columns of chunk tables."""

from rulec.kernel.bucket.plan import chunk_columns

__all__ = ["chunk_columns"]
