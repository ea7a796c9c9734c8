"""Programs that use rulec, to read and to run from a checkout."""
