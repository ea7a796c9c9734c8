"""Calls of a kernel over a bucket of tensors: chunks, slots, the data of each stage, the call itself."""
