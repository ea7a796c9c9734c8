"""Backends as the rest sees them: their protocol, registry, cache and printer."""
