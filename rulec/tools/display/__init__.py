"""A rule for the eye: its kernels, its costs in words, its path on functions of two numbers.

The command line, the playground and the gallery of the manual share it. `katex/` sets formulas in a browser.
"""
