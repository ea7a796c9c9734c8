"""Rules made from rules: sums, chains, wrappers, cases."""
