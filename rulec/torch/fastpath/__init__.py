"""The survey: a check in machine code that tensors and groups are unchanged, by reading their memory without a call."""
