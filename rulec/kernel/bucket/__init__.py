"""What surrounds a kernel that is called over a bucket of tensors: chunks, slots, what a stage needs, the call."""
