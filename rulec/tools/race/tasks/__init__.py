"""The tasks of races, by name. None of them downloads anything."""

from __future__ import annotations

from collections.abc import Callable

from rulec.errors import RulecError
from rulec.language.library.modules import python_module
from rulec.language.source import did_you_mean
from rulec.tools.race.task import Task
from rulec.tools.race.tasks.char import Characters
from rulec.tools.race.tasks.digits import HandwrittenDigits
from rulec.tools.race.tasks.surfaces import narrow_valley, rastrigin, rosenbrock
from rulec.tools.race.tasks.textures import Textures
from rulec.tools.race.tasks.user import UserTask

#: Makers of the tasks that come with rulec.
TASKS: dict[str, Callable[[], Task]] = {
    "digits": HandwrittenDigits, "char": Characters, "cifar-like": Textures,
    "rosenbrock": rosenbrock, "rastrigin": rastrigin, "valley": narrow_valley,
}  # fmt: skip


def task_of(name: str) -> Task:
    """The task of a name, or of the function that `my.py:function` names: then the file runs, as the user's program.

    RulecError where there is none.
    """
    if name in TASKS:
        return TASKS[name]()
    where, colon, function = name.rpartition(":")
    if not colon:
        raise RulecError(
            f"there is no task {name!r}{did_you_mean(name, TASKS)}: use {', '.join(TASKS)}, or a function of a file, "
            f"my.py:function"
        )
    functions = {key: value for key, value in vars(python_module(where)).items() if callable(value)}
    if function not in functions:
        raise RulecError(f"{where} has no function {function!r}{did_you_mean(function, functions)}")
    return UserTask(functions[function], function)
