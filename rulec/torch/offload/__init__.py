"""Offload: states of optimizers on the host, and the transfers between the host and a device."""
