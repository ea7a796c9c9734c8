"""The process that answers the page's questions: a line of JSON for each, on stdin and stdout.

The page's server ends it where an answer takes too long, and it ends with the server.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from rulec.errors import InternalError, RulecError
from rulec.tools.playground.questions import QUESTIONS, Tell

#: Bytes of memory that a process may have, where the system can limit it.
MEMORY = 6 * 2**30


def main() -> None:
    """Says that it is ready, then answers until stdin ends: lines of how much is done, and last an answer or error."""
    folder = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    _limit_memory()

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    say({"ready": True})
    for line in watched(sys.stdin, lambda: os._exit(0)):
        say(reply(line, folder, lambda part: say({"progress": part})))


def watched(stream: TextIO, end: Callable[[], object]) -> Iterator[str]:
    """The lines of a stream, for ever; a thread reads it, and calls `end` once it ends, whatever is done meanwhile.

    The stream ends with its writer, even with a killed one.
    """
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        end()

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def reply(line: str, folder: Path, tell: Tell) -> dict[str, Any]:
    """The answer to a question, or the sentence of an error."""
    question, arguments = json.loads(line)
    try:
        return {"answer": QUESTIONS[question](folder, tell, **arguments)}
    except MemoryError:
        return {"error": f"The rule needs more than {MEMORY // 2**30} GiB of memory here, and was stopped."}
    except RecursionError:
        return {"error": "The rule is nested too deeply."}
    except InternalError as error:
        return _defect(error)
    except RulecError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - a defect in one question must not end the page
        return _defect(error)


def _defect(error: Exception) -> dict[str, str]:
    """The sentence for a defect of rulec; the traceback goes to the terminal."""
    traceback.print_exception(error)
    return {"error": f"This is a defect of rulec, please report it: {type(error).__name__}: {error}"}


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


if __name__ == "__main__":
    main()
