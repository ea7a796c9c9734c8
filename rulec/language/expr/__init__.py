"""Expressions: interned nodes, their operations, text, counts and levels."""
