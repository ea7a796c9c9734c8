"""The invariants of programs, checked after every pass."""

from __future__ import annotations

from rulec.compiler.ir import Program
from rulec.errors import InternalError
from rulec.language.node import Kind, Op, walk


def verify(program: Program, after: str) -> Program:
    """The same program; InternalError, naming the pass, where an invariant does not hold."""
    buffers = {b.name for b in program.buffers}
    between = program.between
    results = {v.name for v in program.vectors}
    cut = len(program.stages) > 1 or bool(between)
    written: set[str] = set()

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise InternalError(f"after {after}, {program.name}: {message}")

    for stage in program.stages:
        for value in walk(stage.roots):
            require(value.op is not Op.NAME, f"the name {value.arg!r} is unresolved")
            if value.op is Op.LOAD:
                require(value.arg in buffers, f"loads {value.arg!r}, which is no buffer")
            if value.op is Op.SCALAR:
                require(int(value.arg) < len(program.columns), "reads past the scalar table")  # type: ignore[call-overload]
            if value.op is Op.RESULT:
                require(value.arg in results, f"a kernel reads {value.arg!r}, which is no vector")
            if cut:
                inside = value.op.kind in (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM)
                require(not inside, f"{value.op.symbol} stands inside a stage")
        stores = [s.buffer for s in stage.stores]
        require(len(stores) == len(set(stores)), "a buffer is stored twice in one stage")
        require(set(stores) <= buffers and "g" not in stores, "a store goes where it must not")
        require(not written & set(stores), "two stages store one buffer")
        written |= set(stores)
    results |= {r.name for stage in program.stages for r in stage.reduces}
    for value in walk(between):
        if value.op is Op.RESULT:
            require(value.arg in results, f"reads {value.arg!r}, which nothing makes")
    return program
