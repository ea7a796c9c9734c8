"""What must hold of every program, whichever passes have run."""

from __future__ import annotations

from rulec.compiler.ir import Program
from rulec.errors import InternalError
from rulec.language.node import Kind, Op, walk


def verify(program: Program, after: str) -> Program:
    """The same program; InternalError, naming the pass, where an invariant does not hold."""
    buffers = {b.name for b in program.buffers}
    available: set[str] = set()
    written: set[str] = set()

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise InternalError(f"after {after}, {program.name}: {message}")

    for stage in program.stages:
        produced = {r.name for r in (*stage.reduces, *stage.matrix)}
        finish = [s.value for s in stage.finish]
        for value in walk([*stage.roots, *finish]):
            require(value.op is not Op.NAME, f"the name {value.arg!r} is unresolved")
            if value.op is Op.LOAD:
                require(value.arg in buffers, f"loads {value.arg!r}, which is no buffer")
                require(value.arg not in written, f"loads {value.arg!r} after a stage has written it")
            if value.op is Op.SCALAR:
                require(int(value.arg) < len(program.scalars.columns), "reads past the scalar table")  # type: ignore[call-overload]
            if value.op is Op.RESULT:
                require(value.arg in available, f"reads {value.arg!r} before a stage has finished it")
            if len(program.stages) > 1:
                require(value.op.kind not in (Kind.REDUCE, Kind.MATRIX), "a reduction stands inside a stage")
        available |= produced
        stores = [s.buffer for s in (*stage.stores, *stage.finish)]
        require(len(stores) == len(set(stores)), "a buffer is stored twice in one stage")
        require(set(stores) <= buffers and "g" not in stores, "a store goes where it must not")
        written |= set(stores)
    return program
