"""Answers to editors about the text of a rule: its mistakes, the words to go on with, and the meaning of a word."""
