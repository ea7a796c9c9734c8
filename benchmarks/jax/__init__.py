"""Steps in JAX on the CPU against optax."""
