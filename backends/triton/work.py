"""The work of one stage of a program over a bucket: tables on the device, slots, options of the launch.

Chunks have sizes for the programs of a grid, and columns in the table `known`. A last kernel combines slots to results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.compiler.ir import Stage
from rulec.compiler.layout import Layout
from rulec.errors import BackendUnavailable
from rulec.formats import Format
from rulec.kernel.multi_tensor.cut import Cut, Lying, Tensors, Whole, counted, parts
from rulec.kernel.multi_tensor.slots import Places, chosen, regions
from rulec.kernel.multi_tensor.uploads import CallArguments, Ring, Uploads
from rulec.kernel.place import COL, is_shaped, place
from rulec.language.expr.node import Op, walk

from .blocks import INTERPRETER, Block, block_for, reducing, tile_for
from .coded import REGISTERS, TOGETHER, Tables, coded_in, columns_of, halved, lengthened
from .memory import Launcher, uploads
from .plan import FINISHED, moved, moving_columns, tile_shapes, vector_width
from .registers import most_registers
from .stage import has_narrow

#: Remembered sets of tensors that fire without the others: so many at most, with so many times the chunks of all
#: tensors. The portions of a large model are such sets, and have its chunks once.
_REMEMBERED, _TIMES = 256, 16

_NOTHING: Any = None


class Launch:
    """The tables of a stage for some of the tensors: their chunks, and the reductions to finish.

    `hosts` is the memory that they were copied from: a captured copy reads it at every replay.
    """

    def __init__(self, chunks: Any, jobs: Any, reduced: Mapping[str, Any], hosts: Sequence[Any]) -> None:
        self.chunks, self.jobs, self.reduced, self.hosts = chunks, jobs, reduced, hosts


class StageWork:
    """One stage over a bucket."""

    def __init__(
        self, tensors: Tensors, index: int, kernels: Mapping[str, Any], addresses: Mapping[str, Any], device: Any,
        ring: Ring, narrow: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        """`addresses` has, by name, the address of each tensor's parameter or state.

        `narrow` makes the kernels for gradients at any address.
        """
        program, layout, stage = tensors.program, tensors.layout, tensors.program.stages[index]
        self._program = program
        self.finish = kernels.get("finish", _NOTHING)
        columns = moving_columns(program, stage)
        self.reads_gradients = "g" in columns
        self.moving = tensors.moving(stage, columns)
        self.device = device
        self._shaped = is_shaped(program, stage, layout)
        self._vector = vector_width(program, stage, layout)
        coded = coded_in(program, stage, layout)
        self._block = lengthened(self._chosen(sum(moved(program, stage, layout)), stage, bool(coded)), coded)
        how = self._how(stage, layout)
        self.cut = how.cut(tensors.seen(self._shaped))
        shape = how.known(self.cut)
        self._places = Places(regions(stage, layout, self.cut, tensors.lying))
        starts = {r.name: first for r, first in zip(self._places.regions, self._places.first, strict=True)}
        fixed = columns_of(program, stage, layout)[len(shape) :]
        known = np.zeros((len(tensors.sizes), len(shape) + len(fixed)), np.int64)
        contents = {**starts, **addresses, **self._tables(coded)}
        for column, content in enumerate([*shape, *(contents[name] for name in fixed)]):
            known[:, column] = content
        self.known, _ = self._uploaded(known)
        self.slots, self._results = self._allocated(self._places.slots), self._allocated(self._places.results)
        self._views = self._places.views(self._results)
        self.call_table = CallArguments(len(tensors.sizes), 1 + len(columns))
        self.uploads = uploads(device, self.call_table.count + 8 * len(program.columns), ring)
        self._ahead = Uploads(ring, 0, spares=0)
        options = self._options(self.emulates(stage, layout)) | self._bounds(stage, layout)
        self.launcher = Launcher(kernels[f"stage_{index}"], options)
        self._narrow = narrow if self.reads_gradients and has_narrow(program, stage, layout) else None
        self._narrow_launcher: Launcher | None = None
        self._some: dict[tuple[int, ...], Launch] = {}
        self._captured: list[Launch] = []
        self.everything = self._launch(range(len(tensors.sizes)))

    def _chosen(self, count: int, stage: Stage, coded: bool) -> Block:
        """The block of a stage that moves `count` bytes for an element, with or without states in codes."""
        name = _device_name(self.device)
        if self._shaped:
            return tile_for(self._vector, name)
        block = self.flat_block(count, name)
        if name == INTERPRETER:
            return block
        if stage.reduces:
            return reducing(block)
        return halved(block) if coded else drawing(block) if draws(stage) else block

    @staticmethod
    def emulates(stage: Stage, layout: Layout) -> bool:
        """Whether the kernel rounds to bfloat16, as the interpreter cannot by itself."""
        return any(layout.dtype(s.buffer) == "bfloat16" for s in stage.stores)

    @staticmethod
    def flat_block(moved: int, device: str) -> Block:
        """The block of a stage without rows and columns, with `moved` bytes moved for an element."""
        return block_for(moved, device)

    def _how(self, stage: Stage, layout: Layout) -> Blocks | Tiles:
        """The cut of tensors into chunks."""
        if not self._shaped:
            least = TOGETHER if coded_in(self._program, stage, layout) else 1
            return Blocks(self._block.elements, bool(stage.reduces), least)
        columns = any(place(r.axes, layout) == COL for r in stage.reduces)
        return Tiles(tile_shapes(self._block.elements, self._vector), columns, bool(stage.reduces))

    def _options(self, emulates: bool) -> dict[str, Any]:
        """The constants of the kernel's compilation."""
        shape = {"VECTOR": self._vector} if self._shaped else {}
        emulated = {"EMULATED": self.device.type == "cpu"} if emulates else {}
        warps = self._block.threads // _warp_size(self.device)
        return {"BLOCK": self._block.elements, **shape, **emulated, "num_warps": warps, "enable_fp_fusion": False}

    def _bounds(self, stage: Stage, layout: Layout) -> dict[str, int]:
        """The bound of a thread's registers, with rows and columns or states in codes, on a GPU of NVIDIA."""
        if not _is_cuda(self.device):
            return {}
        if not self._shaped:
            coded = coded_in(self._program, stage, layout)
            return {"maxnreg": REGISTERS} if coded and not stage.reduces else {}
        count = sum(moved(self._program, stage, layout))
        return {"maxnreg": most_registers(count, self._vector, bool(stage.reduces), self._block.threads)}

    # Tables on the device

    def _tables(self, coded: Sequence[tuple[str, Format]]) -> Mapping[str, int]:
        """Column -> the address of the table of a format; the tables stay for good."""
        tables = Tables(coded)
        self._formats = self._uploaded(tables.words)
        return tables.addresses(self._formats[0].data_ptr())

    def _uploaded(self, table: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        """A table on the device, and the memory of the host that it is copied from. This does not wait for the copy."""
        import torch

        host = torch.from_numpy(np.ascontiguousarray(table))
        if self.device.type == "cpu":
            return host, host
        pinned = host.pin_memory()
        return pinned.to(self.device, non_blocking=True), pinned

    def _allocated(self, count: int) -> Any:
        import torch

        return torch.empty(count, dtype=torch.float64, device=self.device)

    def launch(self, fired: tuple[int, ...] | None, capturing: bool = False) -> Launch:
        """The tables for these tensors, or for all.

        Tables made while a graph is captured stay for good, and belong to the graph alone: each replay fills them.
        """
        if fired is None:
            return self.everything
        launch = self._some.get(fired) or self._launch(fired)
        if capturing:
            self._captured.append(launch)
        elif fired not in self._some:
            self._remember(fired, launch)
        return launch

    def _remember(self, fired: tuple[int, ...], launch: Launch) -> None:
        """Keeps the tables of these tensors for the next time, and drops the oldest where there are too many."""
        some, most = self._some, _TIMES * len(self.everything.chunks)
        some[fired] = launch
        while len(some) > _REMEMBERED or sum(len(each.chunks) for each in some.values()) > most:
            del some[next(iter(some))]

    def _launch(self, fired: Sequence[int]) -> Launch:
        chunks, host = self._uploaded(np.stack(self.cut.numbered(fired), axis=1).astype(np.int32))
        finish, hosts = None, [host]
        if self._places.regions:
            finish, host = self._uploaded(jobs(self._places, np.asarray(fired, np.int64)))
            hosts.append(host)
        return Launch(chunks, finish, chosen(self._views, fired), hosts)

    def rows_ahead(self, rows: np.ndarray[Any, Any]) -> Any:
        """Rows of the scalar table for steps that follow, on the device. They are valid until the next call."""
        words = rows.reshape(-1).view(np.int64)
        return self._ahead.put(words, None, None, False)[: words.size]

    # The launch

    def is_odd(self, words: Whole, capturing: bool = False) -> bool:
        """Whether a gradient among these lines of `moving` lies at no multiple of 16 bytes, and has a kernel for it.

        A capture loads no kernels: what is not loaded yet is left to the common ones.
        """
        if self._narrow is None or (capturing and self._narrow_launcher is None):
            return False
        return bool(np.bitwise_or.reduce(words[:, 1], initial=0) & 15)

    def _launcher(self, odd: bool) -> Launcher:
        if not odd or self._narrow is None:
            return self.launcher
        if self._narrow_launcher is None:
            kernel = self._narrow()[self.launcher.kernel.__name__]
            self._narrow_launcher = Launcher(kernel, self.launcher.constants)
        return self._narrow_launcher

    def run(self, launch: Launch, moving: Any, table: Any, stays: Any, scale: Any, odd: bool = False) -> None:
        """Runs the stage's kernel, and the kernel that finishes its reductions.

        If a gradient is `odd`, all gradients of the launch are read at any address.
        """
        reduces = [self.slots] * bool(self._places.regions)
        if len(launch.chunks):
            arguments = [launch.chunks, self.known, moving, table, stays, scale, *reduces]
            try:
                self._launcher(odd).run_on(len(launch.chunks), arguments)
            except compiler_errors() as error:
                raise BackendUnavailable(refusal(self._program.name, self.device, error)) from error
        if launch.jobs is not None and len(launch.jobs):
            self.finish[(len(launch.jobs),)](launch.jobs, self.slots, self._results, LANES=FINISHED)


def draws(stage: Stage) -> bool:
    """Whether a stage rounds at random."""
    return any(node.op is Op.CHANCE for node in walk(stage.roots))


def drawing(block: Block) -> Block:
    """The block of a stage that rounds at random: a thread has fewer elements, and so more threads fit on a GPU."""
    return Block(block.elements // 2, block.threads)


def compiler_errors() -> tuple[type[Exception], ...]:
    """Triton's exceptions for a kernel that it cannot compile, or too large for a GPU."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return (CompilationError, OutOfResources, PTXASError)


def refusal(rule: str, device: Any, error: Exception) -> str:
    """One sentence about an exception of the compiler, with the remedy."""
    import torch

    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    place = _device_name(device)
    if device.type != "cpu":
        place = "{} (compute capability {}.{})".format(place, *torch.cuda.get_device_capability(device))
    return f"Triton cannot compile {rule} for {place}: {reason}: choose another backend (`rulec doctor` lists them)"


def _warp_size(device: Any) -> int:
    """The threads of a warp: 32 on NVIDIA's GPUs, 64 on most of AMD's."""
    return 32 if device.type == "cpu" else int(_target().warp_size)


def _is_cuda(device: Any) -> bool:
    """Whether the device is a GPU of NVIDIA; torch calls AMD's GPUs cuda, too."""
    return device.type != "cpu" and str(_target().backend) == "cuda"


def _target() -> Any:
    """What Triton compiles for: its `backend`, `arch` and `warp_size`."""
    import triton

    return triton.runtime.driver.active.get_current_target()


def _device_name(device: Any) -> str:
    if device.type == "cpu":
        return INTERPRETER
    import torch

    return str(torch.cuda.get_device_name(device))


#: Chunks of one tensor, at most. With more blocks, a program takes several, one after the other, and the table of
#: chunks stays small.
MOST_CHUNKS = 1 << 16
#: Chunks of one tensor, at most, where each writes a slot for another program, or has tiles.
MOST_REDUCED = 1 << 12
#: Where columns are reduced: the least tiles of a chunk, and the most chunks of a matrix, one below the other. The line
#: of slots for each chunk must cost little beside its elements.
LEAST_TILES = 8
MOST_PIECES = 128
#: Where nothing is reduced, so that the cut decides no bits: the chunks of one tensor from which on a chunk may have
#: several tiles, up to `LEAST_TILES`. What a program reads before its first tile must cost little beside its tiles.
ENOUGH_CHUNKS = 1 << 10
#: The same for chunks of blocks, whose programs are smaller.
MANY_CHUNKS = 1 << 13
#: From this many elements of a row on, tiles have one row: places in a tile of several rows would need 64 bits.
WIDEST = 1 << 26


@dataclass(frozen=True)
class Blocks:
    """Chunks of whole blocks of `block` elements; fewer in a stage that `reduces`.

    A chunk has `least` blocks where a tensor has enough chunks, and nothing is reduced.
    """

    block: int
    reduces: bool
    least: int = 1

    def cut(self, tensors: Lying) -> Cut:
        """Single rows in chunks."""
        count = parts(tensors.width, self.block)
        together = _together(count, self.reduces)
        if not self.reduces:
            together = np.maximum(together, np.minimum(self.least, np.maximum(count // MANY_CHUNKS, 1)))
        return Cut(tensors, 1, 1, self.block * together)

    def known(self, cut: Cut) -> list[Whole]:
        """The `FLAT` columns."""
        return [cut.tensors.width, cut.wide // self.block]


@dataclass(frozen=True)
class Tiles:
    """Chunks of tiles one below the other, of one of the `shapes` of `tile_shapes`.

    `columns` is True in a stage with reductions to columns, `reduces` with any reductions.
    """

    shapes: tuple[tuple[int, int, int], ...]
    columns: bool
    reduces: bool

    def cut(self, tensors: Lying) -> Cut:
        """Matrices in chunks."""
        matrices, rows, wide = np.array(self.shapes, np.int64)[self.tile(tensors)].reshape(-1, 3).T
        down = parts(tensors.height, rows)
        count = down * parts(tensors.width, wide) * parts(tensors.batch, matrices)
        depth = _together(count, True)
        if self.columns:
            depth = np.maximum(depth, np.maximum(LEAST_TILES, parts(down, MOST_PIECES)))
        if not self.reduces:
            depth = np.maximum(depth, np.minimum(LEAST_TILES, parts(count, ENOUGH_CHUNKS)))
        return Cut(tensors, matrices, np.minimum(depth, np.maximum(down, 1)) * rows, wide)

    def tile(self, tensors: Lying) -> Whole:
        """The index of each tensor's shape of tiles."""
        batch, height, width = tensors.batch, tensors.height, tensors.width
        wide, narrow, small = self.shapes[1][2], self.shapes[2][2], self.shapes[3][1]
        long = ((height == 1) & (width > wide)) | (width >= WIDEST)
        small_ones = (batch > 1) & (height <= 2 * small)
        tile: Whole = np.select([long, width > narrow, small_ones], [0, 1, 3], 2)
        return tile

    def known(self, cut: Cut) -> list[Whole]:
        """The `SHAPED` columns."""
        tensors = cut.tensors
        return [
            tensors.batch, tensors.height, tensors.width, cut.lines, cut.across, cut.deep, self.tile(tensors),
        ]  # fmt: skip


def _together(count: Whole, reduces: bool) -> Whole:
    """The number of blocks in a chunk, for a tensor of `count` blocks."""
    return np.maximum(parts(count, MOST_REDUCED if reduces else MOST_CHUNKS), 1)


#: The slots of a result that one lane joins, one after the other. With more slots, all lanes join some.
MOST_ROUNDS = 64


def jobs(places: Places, fired: Whole) -> Whole:
    """Lines of `jobs` (see the printed `finish`) for these tensors."""
    return np.concatenate([_jobs(places, number, fired) for number in range(len(places.regions))])


def _jobs(places: Places, number: int, fired: Whole) -> Whole:
    region, to = places.regions[number], places.targets(number, fired)
    sizes, counts, slots = region.sizes[fired], region.counts[fired], places.first[number][fired]
    one = (sizes == 1) | (counts > MOST_ROUNDS)
    width = np.where(one, 1, FINISHED)
    each, part = counted(parts(sizes, width))
    done, single, size, count = part * width[each], one[each], sizes[each], counts[each]
    columns = [
        np.full(len(each), region.code), single, slots[each] + done, to[each] + done,
        np.where(single, parts(count, FINISHED), count), np.where(single, FINISHED * size, size),
        np.where(single, size, 1), np.where(single, count, np.minimum(size - done, FINISHED)),
    ]  # fmt: skip
    return np.stack([np.asarray(c, np.int64) for c in columns], axis=1)
