"""Rules as source files of their own, written by `rulec build`, for projects that do not depend on rulec."""
