"""Races: rules side by side on one task, over learning rates and seeds."""

from rulec.racing.race import race
from rulec.racing.result import Result
from rulec.racing.task import Task

__all__ = ["Result", "Task", "race"]
