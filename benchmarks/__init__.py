"""Measurements as commands: what `rulec bench` runs.

Everything is a ratio within one run: two things are timed in turn, again and again, and their medians are compared.
"""
