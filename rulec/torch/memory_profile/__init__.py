"""The memory of a training step in torch by kind, from moment to moment: measured on real tensors or on fake ones."""
