"""Rules as source files of their own: what `rulec build` writes, for projects that do not depend on rulec."""
