"""The measurements of `rulec bench`.

Every figure is a ratio within one run: two things are timed in turn, again and again, and their medians are compared.
"""
