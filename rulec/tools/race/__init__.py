"""Races: rules side by side on one task, over learning rates and seeds."""

from rulec.tools.race.race import race
from rulec.tools.race.result import Result
from rulec.tools.race.task import Task

__all__ = ["Result", "Task", "race"]
