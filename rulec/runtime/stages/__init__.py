"""One launch, stage by stage: kernels, the values between them, tiles."""
