"""Source in languages of the C family: an element, loops over chunks, and functions, with a record for each dialect."""
