"""Evolution strategies for plain arrays and a forward of the user's own."""
