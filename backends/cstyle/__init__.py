"""What languages of the C family share: an element, loops over chunks, and functions, in a record for each dialect."""
