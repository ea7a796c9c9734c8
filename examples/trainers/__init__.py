"""Rules in the trainers that people use, one script each: `python examples/trainers/skorch_net.py`.

Each trains a small model for seconds, without a network, and prints the first and the last loss. docs/trainers.md says
which lines matter.
"""
