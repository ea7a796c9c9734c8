"""The survey: whether tensors and groups are as they were, read in their memory without a call."""
