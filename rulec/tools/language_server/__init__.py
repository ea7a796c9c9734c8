"""What editors ask about the text of a rule: its mistakes, the words to go on with, and what a word means."""
