"""Rules in the notation of others: LaTeX and sympy."""
