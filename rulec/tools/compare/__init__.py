"""A rule beside another computation of the same: another library's, the 50-digit oracle's, a backend's.

`difference` finds where two sides part, `oracle` measures the exactness of a side, `lines` traces every line of a step.
"""
