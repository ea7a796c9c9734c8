"""One step of all groups: plans, snapshots, repeats and checks."""
