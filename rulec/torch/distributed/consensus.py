"""The consensus of ranks with shards of the same DTensors: they agree on every step, and on its failure in one rank.

`Consensus` is the step coordinator of DTensors. The error messages for a step that lost ranks are here too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.errors import RulecError
from rulec.language.expr.node import Op
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.buckets.scalar_table_device import Scaling
from rulec.runtime.distributed.owners import Assignment, Schedule, Work
from rulec.runtime.distributed.process_group import DeferredError, RankGroup, RemoteError, Unreached
from rulec.torch.distributed.comparison import Compared, OtherOrder, settle
from rulec.torch.distributed.traffic import Traffic

#: A number above every world size, and the bytes of an error that are sent to other ranks.
_PROCESSES, _TEXT = 1 << 24, 600

#: The words at the end of the first message, of a rank that repeats the last step.
_WORDS = np.array([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])

#: The number of steps with remembered later messages.
_STEPS = 16

#: One message: an operation, its rank group, and the number of its numbers.
Message = tuple[Op, RankGroup, int]


@dataclass
class _LastStep:
    """A step: the messages of its first round, its digest, and the objects that the digest follows from."""

    expected: list[Message] = field(default_factory=list)
    digest: int | None = None
    objects: tuple[Any, ...] = ()
    crc: int = 0


class Consensus:
    """The consensus of ranks on every step in which shards of tensors are reduced together.

    The first message of a step to each rank group ends with words. They count ranks: those that refuse the step, those
    with another step than the last one of its kind, those without its later messages, and all. They also have the
    digests of the hyper-parameters. If one rank refuses, or not all take the other step, or hyper-parameters differ,
    all raise RulecError, and nothing is written. Another step is compared before it begins, with the descriptions of
    the optimizers. If matrices travel to owner ranks, or sums follow a write, a message of the words alone comes
    first.

    After that a rank may fail. If all know the later messages, sums among them end with one word more: whether a
    rank has failed. A failed rank goes on to send them, with placeholder data. Elsewhere a message of this word alone
    comes before each further round, and before anything is written. Then all ranks raise the same error.
    """

    def __init__(self, rank_groups: Sequence[RankGroup]) -> None:
        self.rank_groups = [*dict.fromkeys(rank_groups)]
        #: The last step of each kind, with statistics and without; and the one of the open step's kind.
        self._lasts = {False: _LastStep(), True: _LastStep()}
        self._last = self._lasts[False]
        self._alike: Any = None
        #: Whether this rank waits for messages; and messages that it did not wait for.
        self._waits, self._on_their_way = True, list[Any]()
        #: The words sent with sums: NumPy arrays, or tensors.
        self._words: Any = _WORDS.copy()
        self._failures: Any = np.zeros(1)
        #: Whether ranks agree on the step in a message of the words alone, and not in its first round.
        self._apart = False
        #: Whether the first round is not over, and whether ranks have agreed.
        self._open = self._agreed = False
        #: Whether a step has begun and no rank is known to have failed; and whether it is being written.
        self._begun = self._writes = False
        #: Whether messages of one word alone report a failed rank; and whether one comes after everything is written.
        self._guarded = self._ends = False
        #: The rounds between the first and the writing: of this step as far as they are over, and as earlier steps had
        #: them, by the objects of these steps.
        self._rounds: list[list[Message]] = []
        self._later: list[list[Message]] = []
        self._known: list[tuple[tuple[Any, ...], list[list[Message]]]] = []
        self._sent: list[Message] = []
        #: The reason that other ranks have taken a step without this rank.
        self._behind = ""
        self.failure = DeferredError()
        self.traffic = Traffic()

    def __reduce__(self) -> Any:
        raise RulecError("an optimizer of DTensors belongs to its processes: copy its state_dict() instead")

    # A step

    def open(self, measures: bool = False) -> None:
        """Opens a step, which `measures` statistics: until its first round is over this rank may refuse it."""
        self._last = self._lasts[measures]
        self._open, self._agreed, self._begun, self._writes = True, False, False, False
        self._sent, self._rounds = [], []
        self._words, self._failures = _WORDS.copy(), np.zeros(1)
        self.failure = DeferredError()
        self.traffic.begin()

    def check_even(self) -> None:
        """RulecError where other ranks have taken a step without this rank."""
        if self._behind:
            raise behind(self._behind)

    def restore(self) -> None:
        """Records that a checkpoint was loaded."""
        self._behind = ""

    def begin(
        self, plan: Any, launches: Sequence[Launch], scaling: Scaling | None, guarded: bool, alike: Compared | None
    ) -> None:  # fmt: skip
        """Begins the opened step with these launches; RulecError where another rank takes another step.

        It is another step where the scaled gradients of one rank have an infinity, and those of another none. The
        description `alike` is compared too: OtherOrder where one rank has its tensors in another order. If
        `guarded`, the rounds of the step also wait for ranks outside of these groups.
        """
        digest = self._digest_of(plan, launches, scaling is not None and bool(scaling.found_inf))
        self._ends = any(launch.version.waits and launch.version.plan.ends_later for launch in launches)
        self._apart = self._ends or any(launch.version.exchanges for launch in launches)
        self._guarded = self._apart or guarded
        self._known = plan.later
        later = [rounds for step, rounds in self._known if _same(step, self._last.objects[1:])]
        self._later = later[0] if later else []
        assert alike is not None
        self._words[2], self._alike = not later, alike
        self._words[4:] = alike.sums
        if digest != self._last.digest:
            if self._last.digest is not None:
                self._words[1] = 1.0
                self._replay()
                self._check()
            self._compare(digest)
            self._last.expected = [(Op.SUM, rank_group, 0) for rank_group in self.rank_groups]
            self._last.digest, self._agreed, self._guarded = digest, not self._apart, True
        elif not self._apart and not any(count for _, _, count in self._last.expected):
            self._replay()
            self._check()
            self._agreed = True
        self._begun, self._writes = True, not any(launch.version.waits for launch in launches)

    def leave(self) -> None:
        """Ends a step, taken or not."""
        self._begun, self.failure = False, DeferredError()

    def refuse(self, waits: bool = True) -> None:
        """Tells waiting ranks that this rank takes no step, and waits for them if `waits`."""
        if not self._open or self._agreed:
            return
        self._open, self._waits = False, waits
        self._words[0] = 1.0
        try:
            if self._last.digest is None:
                self._compared(None)
            else:
                self._replay()
        finally:
            self._waits = True

    def compare(self, alike: Compared) -> None:
        """Compares descriptions outside of a step: all ranks raise RulecError or OtherOrder on a difference."""
        self._alike = alike
        self._compare(0)
        self._open = False

    # Rounds of reductions

    def reduce(self, op: Op, rank_group: RankGroup, numbers: Any) -> Any:
        """All-reduces a vector in float64 over a rank group."""
        self._sent.append((op, rank_group, len(numbers)))
        if op is Op.SUM and self._open and not self._agreed:
            result, self._words = self._joint(rank_group, numbers, self._words)
        elif op is Op.SUM and self._begun and not self._open and not self._guarded:
            result, self._failures = self._joint(rank_group, numbers, self._failures)
        else:
            result = self._send(op, rank_group, numbers)
        return result

    def close(self) -> None:
        """Ends a round. At the end of the first round, RulecError where the ranks do not agree."""
        told = {rank_group for op, rank_group, _ in self._sent if op is Op.SUM}
        missing = [rank_group for rank_group in self.rank_groups if rank_group not in told]
        if self._open:
            self._close_first(missing)
        elif self._begun and not self._guarded and len(self._rounds) + 1 == len(self._later):
            self._tell_others(missing)
        self.traffic.end_round()
        if not self._open:
            self._rounds.append(self._sent)
        else:
            self._open, self._last.expected = False, self._sent
            if not self._agreed:
                self._check()
                self._agreed = True
        self._sent = []
        self.failure.turn += 1

    def _close_first(self, missing: Sequence[RankGroup]) -> None:
        for rank_group in missing:
            if self._agreed:
                self._sent.append((Op.SUM, rank_group, 0))
            else:
                self.reduce(Op.SUM, rank_group, np.zeros(0))

    def _tell_others(self, missing: Sequence[RankGroup]) -> None:
        """Tells rank groups without a sum in the last round whether a rank has failed."""
        for rank_group in missing:
            _, self._failures = self._joint(rank_group, np.zeros(0), self._failures)

    def assigned(self, rank_group: RankGroup, works: Sequence[Work], chosen: Assignment) -> None:
        """Records the owner ranks of tensors, and their work."""
        self.traffic.assigned(rank_group, works, chosen)

    def exchanged(self, rank_group: Any, schedule: Schedule) -> None:
        """Records matrices that travel to their owner ranks and back."""
        self.traffic.exchanged(rank_group, schedule, rank_group.device().type)

    def _send(self, op: Op, rank_group: Any, numbers: Any, of_host: bool = False) -> Any:
        """All-reduces a message. `of_host` says that it has no values, but words: in all ranks alike."""
        self.traffic.reduced(rank_group, len(numbers), rank_group.device(of_host).type)
        if not self._waits:
            self._on_their_way = [sent for sent in self._on_their_way if not sent.work.is_completed()]
            self._on_their_way.append(rank_group.start_reduce(op, numbers, of_host))
            return numbers
        try:
            return rank_group.reduce(op, numbers, of_host)
        except Unreached:
            self._open = self._begun = False  # no message can reach another rank
            raise

    def _joint(self, rank_group: RankGroup, numbers: Any, words: Any) -> tuple[Any, Any]:
        """All-reduces a vector and words, in one message of sums."""
        count, of_host = len(words), not len(numbers)
        if isinstance(numbers, Tensor):
            joint = torch.cat([numbers, torch.as_tensor(words, device=numbers.device)])
            result = self._send(Op.SUM, rank_group, joint, of_host)
        else:
            result = self._send(Op.SUM, rank_group, np.concatenate([numbers, _on_host(words)]), of_host)
        return result[:-count], result[-count:]

    def _replay(self) -> None:
        """Sends the messages of the first round of the last step with zeros: other ranks may wait for them."""
        for op, rank_group, count in self._last.expected:
            if op is Op.SUM:
                _, self._words = self._joint(rank_group, np.zeros(count), self._words)
            else:
                self._send(op, rank_group, np.zeros(count))
        self.traffic.end_round()

    # Failure

    def check(self) -> None:
        """Comes before a round. RulecError, in all ranks, where one has failed or they do not agree."""
        if not self._begun:
            return
        self.failure.turn += 1
        if not self._agreed:
            if self._apart:
                self._replay()
                self._check()
                self._open, self._agreed = False, True
        elif self._guarded:
            self._ask()

    def conclude(self) -> None:
        """Comes before anything is written. RulecError, in all ranks, where one has failed."""
        if not self._begun or self._writes:
            return
        self.check()
        if not self._guarded and self._failures[0]:
            raise self._told()
        if not self._apart:
            others = [known for known in self._known if not _same(known[0], self._last.objects[1:])]
            self._known[:] = [(self._last.objects[1:], self._rounds), *others][:_STEPS]
        self._writes = self._guarded = True

    def end(self) -> None:
        """Comes when everything is written. RulecError, in all ranks, where one has failed in later rounds."""
        if self._begun and self._ends:
            self._ask()
        self._ends = False

    def fail(self, error: Exception, tensors: Sequence[str]) -> Exception:
        """Reports an error at some tensors to the waiting ranks. Returns the error that this rank raises.

        It is the same error where no rank waits any more, or where this rank may refuse the step.
        """
        if not self._begun or not self._agreed or isinstance(error, Unreached):
            return error
        self.failure.note(error, tensors)
        later = self._later[len(self._rounds) :]
        if (self._writes and not self._ends) or not (self._guarded or later):
            self._behind, self._begun = str(self.failure), False
            return error
        self._failures = np.ones(1)
        if self._guarded:
            self._of_all(Op.SUM, self._failures)
            return self._told()
        for messages in later:
            for op, rank_group, count in messages:
                self.reduce(op, rank_group, np.zeros(count))
            self.close()
        return self._told()

    def _ask(self) -> None:
        """RulecError, in all ranks, where one has failed."""
        if self._of_all(Op.SUM, np.zeros(1))[0]:
            raise self._told()

    def _told(self) -> RemoteError:
        """The common error of all ranks: the error of the first rank to fail."""
        self._begun = self._open = False
        rank, nobody, error = torch.distributed.get_rank(), np.inf, self.failure.error
        mine = nobody if error is None else self.failure.at * _PROCESSES + rank
        first = self._of_all(Op.MIN, np.array([mine]))[0]
        text = self.failure.sentence(rank).encode()[:_TEXT] if mine == first else b""
        said = self._of_all(Op.MAX, np.array([*text.ljust(_TEXT, b"\0")], np.float64))
        told = RemoteError(bytes(map(int, said)).rstrip(b"\0").decode(errors="ignore"))
        told.__cause__ = error
        return told

    # Agreement

    def _check(self) -> None:
        """RulecError unless all ranks take a step, and either all or none of them another step than the last one."""
        refused, changed, unknown, there, *sums = map(int, _on_host(self._words))
        if refused:
            self._open = False
            raise _refused()
        if changed not in (0, there):
            self._open = False
            raise _other_step()
        if not changed and (there * sums[1] != sums[0] ** 2 or there * sums[3] != sums[2] ** 2):
            self._settle()
        self._guarded = self._guarded or bool(unknown)
        self._words = _WORDS.copy()

    def _compare(self, digest: int) -> None:
        """RulecError unless all ranks begin the step with this digest, and have equal descriptions."""
        other_step, others, refused = self._compared([float(digest), self._alike.digest])
        if refused:
            self._open = False
            raise _refused()
        if others:
            self._settle()
        if other_step:
            self._open = False
            raise _other_step()

    def _compared(self, digests: Sequence[float] | None) -> list[bool]:
        """Whether each digest differs in some rank, and whether any rank refuses; a refusing rank has no digests."""
        words = [-np.inf] * 4 + [1.0] if digests is None else [y for x in digests for y in (-x, x)] + [0.0]
        low, high, other_low, other_high, refused = self._of_all(Op.MAX, np.array(words)).tolist()
        return [-low != high, -other_low != other_high, bool(refused)]

    def _settle(self) -> None:
        """RulecError, or OtherOrder, in all ranks, where descriptions differ."""
        try:
            settle(self._alike, self._of_all)
        except (RulecError, OtherOrder):
            self._open = False
            raise

    def _of_all(self, op: Op, numbers: Any) -> Any:
        """All-reduces numbers over all ranks, in a message of their own."""
        for rank_group in self.rank_groups:
            numbers = self._send(op, rank_group, numbers, of_host=True)
        self.traffic.end_round()
        return numbers

    def _digest_of(self, plan: Any, launches: Sequence[Launch], overflowed: bool) -> int:
        """The digest of a step: of the updated parameters, of the programs that update them, and of an overflow."""
        step = (plan, overflowed, *(x for launch in launches for x in (launch.version, launch.part)))
        if not _same(step, self._last.objects):
            programs = [(launch.version.program, [t.number for t in launch.part.tensors]) for launch in launches]
            told = [(p.name, [r.name for s in p.stages for r in s.reduces], numbers) for p, numbers in programs]
            self._last.crc = zlib.crc32(repr((told, overflowed)).encode())
            self._last.objects = step
        return self._last.crc


def _on_host(words: Any) -> Any:
    """The words as a NumPy array; waits for a device."""
    return words.cpu().numpy() if isinstance(words, Tensor) else words


def _same(step: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two steps consist of the same objects."""
    return len(step) == len(other) and all(a is b for a, b in zip(step, other, strict=True))


def _refused() -> RulecError:
    return RulecError("another process takes no step, for an error of its own: see there; nothing was changed")


def _other_step() -> RulecError:
    return RulecError(
        "the processes have gradients of other tensors, or other rules, or infinities in the scaled gradients of some: "
        "give every process the gradients of the same tensors, and reduce GradScaler's findings; nothing was changed"
    )


def behind(cause: str) -> RulecError:
    """The error of a rank without a step that other ranks have taken."""
    return RulecError(
        f"this process failed after all had agreed on a step ({cause}), and others have taken that step: load a "
        f"checkpoint in every process"
    )


@contextmanager
def reaching(processes: str) -> Iterator[None]:
    """A context of messages to other ranks; RulecError where they do not arrive."""
    try:
        yield
    except RuntimeError as error:
        raise Unreached(
            f"another process of {processes} has ended, or did not answer in the time of its process group: start all "
            f"again from a checkpoint ({str(error).splitlines()[0][:200]})"
        ) from error
