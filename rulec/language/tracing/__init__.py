"""Rules written as Python functions, which are traced."""
