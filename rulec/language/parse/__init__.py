"""The text of expressions and steps, read with the position of each mistake."""
