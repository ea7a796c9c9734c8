"""AdamW and a few others at the sizes of models, each beside one peer at a time, to leave all memory to the two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding, Note, Part
from benchmarks.gpu.peers import FUSED, PEERS, Peer, peer_of
from benchmarks.gpu.rules import AS_FAST, QUICK_ROUNDS, SHARE, bytes_moved, step_of
from benchmarks.gpu.tensors import BYTES_EACH, FULL, MANY, QUICK, SIZES, Size, copying, in_sets, parameters, sizes
from benchmarks.gpu.time import Step, timed
from benchmarks.result import Row
from rulec.errors import RulecError

ROUNDS = 20

#: The sizes at which other rules than AdamW are measured too.
_OTHERS_AT = SIZES[:3]


def judged_parts(only: Sequence[str]) -> list[Part]:
    """What has a target: AdamW against torch's fused step at every size, one large tensor against other steps."""
    judged = [part for part in _parts(only) if _target(part) is not None]
    return sorted(judged, key=lambda part: (part.arguments[2] != FUSED.name, _compiling(part)))


def peer_parts(only: Sequence[str]) -> list[Part]:
    """All other peers: slow compilers last, and of these the many tensors at the very end, since they take longest."""
    return sorted((part for part in _parts(only) if _target(part) is None), key=_compiling)


def _target(part: Part) -> float | None:
    size, rule, peer = part.arguments
    return peer_of(rule, peer).target_at(size)


def _compiling(part: Part) -> tuple[bool, bool]:
    size, rule, peer = part.arguments
    slow = peer_of(rule, peer).slow
    return slow, slow and size == MANY


def _parts(only: Sequence[str]) -> list[Part]:
    chosen = []
    for rule, peers in PEERS.items():
        for size in SIZES if rule == "adamw" else _OTHERS_AT:
            chosen += [_part(size, rule, p) for p in peers if not p.missing and (not only or rule in only)]
    return chosen


def _part(size: str, rule: str, peer: Peer) -> Part:
    name = f"{rule} at {size} against {peer.name}"
    if peer.slow:
        return Part(name, against, (size, rule, peer.name), seconds=70.0, least=30.0)
    return Part(name, against, (size, rule, peer.name), seconds=45.0, least=5.0)


def not_installed(only: Sequence[str]) -> list[str]:
    """A note for each peer that is not installed."""
    peers = [peer for rule, peers in PEERS.items() for peer in peers if not only or rule in only]
    return list(dict.fromkeys(peer.missing for peer in peers if peer.missing))


def against(bench: Bench, size: str, rule: str, peer: str) -> Iterator[Finding]:
    """Our step beside a peer's and a copy; each has states of its own, over the same parameters and gradients."""
    chosen = sizes(bench).get(size)
    if chosen is None:
        return
    tensors = chosen()
    theirs = peer_of(rule, peer)
    need, free = BYTES_EACH * tensors.elements, bench.device.free_bytes()
    if need > free:
        needed = f"it needs {need / 2**30:.0f} GiB of memory, {free / 2**30:.0f} are free"
        yield Note(f"{rule}, {tensors.name}, against {peer}: not run: {needed}")
        return
    contenders, params = _contenders(bench, tensors, rule, theirs)
    times = timed(bench.device, contenders, QUICK_ROUNDS if bench.quick else ROUNDS, 6.0)
    if any(param.grad is None for param in params):
        raise RulecError(f"{peer} took gradients away, after which a step has nothing to do")
    detail = {**times.detail("peer", "step"), "sets": len(contenders["step"])}
    subject = f"{rule}, {tensors.name}"
    yield Row(subject, f"{AS_FAST} {peer}", times.ratio("peer", "step"), theirs.target_at(size), detail=detail)
    if theirs is FUSED:
        moved, copied = sum(bytes_moved(rule, shape) for shape in tensors.shapes), 8 * _copied(bench)
        yield Row(subject, SHARE, times.ratio("copy", "step") * moved / copied, detail={**detail, "bytes": moved})


def _copied(bench: Bench) -> int:
    return QUICK if bench.quick else FULL


def _contenders(
    bench: Bench, tensors: Size, rule: str, peer: Peer
) -> tuple[dict[str, Sequence[Step]], list[Any]]:  # fmt: skip
    """The steps of all contenders, and all parameters.

    There are several sets of parameters where one fits the cache; one set where the peer compiles, for it would compile
    each set anew.
    """
    params: list[Any] = []

    def one_set() -> list[Step]:
        one_params = parameters(bench, tensors)
        params.extend(one_params)
        return [step_of(rule, one_params), peer.step(one_params)]

    ours, theirs = in_sets(bench, one_set, 2**40 if peer.slow else 16 * tensors.elements)
    return {"step": ours, "peer": theirs, "copy": [copying(bench, _copied(bench))]}, params
