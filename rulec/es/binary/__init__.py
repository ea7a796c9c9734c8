"""Binary weights: bits drawn from probabilities, packed, and multiplied by exclusive or and counting."""
