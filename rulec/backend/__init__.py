"""Backends as other packages see them: their protocol, registry, cache and printer."""
