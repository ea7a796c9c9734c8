"""A rule beside something that should compute the same: another library, the 50-digit oracle, a backend.

`difference` finds where two sides part, `oracle` how exact a side is, `lines` what every line of a step gives.
"""
