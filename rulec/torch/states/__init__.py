"""States of parameters: their store, codes, sections, and what a saved state must be."""
