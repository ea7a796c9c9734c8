"""rulec in other packages' trainers, by the real packages: `make trainers` has an environment of them."""
