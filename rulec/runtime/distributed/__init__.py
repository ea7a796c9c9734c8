"""Tensors of which each rank has a shard: owner ranks, all-to-all, process groups."""
