"""Tensors that are sharded over ranks: shards, owner ranks, all-to-all, process groups."""
