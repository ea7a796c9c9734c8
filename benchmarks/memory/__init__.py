"""What a step allocates, and what training keeps."""
