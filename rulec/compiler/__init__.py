"""From a rule to a program: named passes, the layout of memory, the reference interpreter."""
