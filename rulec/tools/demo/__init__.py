"""The demonstration: a rule that is not in the library, from its text to a trained model."""
