"""A rule as one Python file for PyTorch, with Triton's kernels."""

from .file import TritonFile

files = TritonFile.files
