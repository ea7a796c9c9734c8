"""Tensors of one program and layout: their numbers, scalar tables and launches."""
