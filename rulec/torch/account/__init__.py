"""What a training step in torch keeps in memory, of which kind, and when: measured on real tensors or on fake ones."""
