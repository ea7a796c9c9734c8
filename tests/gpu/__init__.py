"""What interpreters and compilers prove without a GPU, once more on one: pytest -m gpu."""
