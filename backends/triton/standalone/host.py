"""The parts of a printed file that are the same for all rules: launches, tables, uploads, and vectors of tensors."""

from __future__ import annotations

#: A launch, and the cut of tensors into chunks.
LAUNCH = '''\
#: Whether kernels run in Triton's interpreter; and whether compiled kernels take constants, as from Triton 3.3 on.
INTERPRETED = not isinstance(<kernel>, triton.JITFunction)
CONSTANTS = tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 3)


class Launch:
    """A kernel: its first launch on a device compiles it, and later ones do not look for the result again."""

    def __init__(self, kernel, **constants):
        self.kernel, self.constants, self.compiled = kernel, constants, {}

    def __call__(self, programs, *tensors):
        """So many programs of the kernel with these tensors; None stands for no tensor."""
        device = tensors[0].device
        if device in self.compiled:
            compiled, constants = self.compiled[device]
            compiled[programs, 1, 1](*[x if x is None else x.data_ptr() for x in tensors], *constants)
            return
        compiled = self.kernel[(programs,)](*tensors, **self.constants)
        if compiled is not None and CONSTANTS:
            names = self.kernel.arg_names[len(tensors) :]
            self.compiled[device] = compiled, [self.constants[name] for name in names]
'''

FLAT = '''\
def blocks(size, block, most):
    """A tensor cut into chunks of whole blocks, `most` at most: its columns of `known`, and how many chunks it has."""
    count = -(-size // block)
    span = max(1, -(-count // most))
    return (size, span), (-(-count // span), 1, 1)
'''

SHAPED = '''\
def tiles(batch, height, width, block, vector, columns, reduces):
    """Matrices, as they lie in memory, cut into chunks of tiles: the columns of `known`, and how many chunks there are.

    These are counted in all, side by side, and one below the other. `columns` says whether columns are reduced,
    `reduces` whether anything is.
    """
    wide = 32 * vector
    shapes = (1, 1, block), (1, block // wide, wide), (1, block // 8, 8), (block // 64, 8, 8)
    small = 3 if batch > 1 and height <= 16 else 2
    tile = 0 if (height == 1 and width > wide) or width >= 2**26 else 1 if width > 8 else small
    matrices, rows, beside = shapes[tile]
    down, across = -(-height // rows), -(-width // beside)
    count = down * across * -(-batch // matrices)
    depth = max(1, -(-count // 4096))
    if columns:
        depth = max(depth, 8, -(-down // 128))
    if not reduces:
        depth = max(depth, min(8, -(-count // 1024)))
    lines = min(depth, max(down, 1)) * rows
    deep = -(-height // lines)
    return (batch, height, width, lines, across, deep, tile), (across * deep * -(-batch // matrices), across, deep)
'''

#: Of a stage without reductions.
PLAIN_STAGE = '''\
class Stage:
    """A kernel and its tables for some tensors: their chunks, and how they lie."""

    def __init__(self, launch, device, cuts, addresses):
        """`cuts` has each tensor's, `addresses` a list for each of the last columns of `known`."""
        self.launch, self.count = launch, sum(counts[0] for _, counts in cuts)
        chunks = [(i, number) for i, (_, counts) in enumerate(cuts) for number in range(counts[0])]
        self.chunks = torch.tensor(chunks, dtype=torch.int32).to(device)
        known = [(*columns, *at) for (columns, _), *at in zip(cuts, *addresses, strict=True)]
        self.known = torch.tensor(known).to(device)

    def __call__(self, moving, table):
        """Runs the kernel."""
        self.launch(self.count, self.chunks, self.known, moving, table, None, None)
'''

REDUCING_STAGE = '''\
FINISH = Launch(finish, LANES=256)


class Stage:
    """A kernel and its tables for some tensors: their chunks, how they lie, and what their chunks reduce."""

    def __init__(self, launch, device, cuts, addresses, reduces=()):
        """`cuts` has each tensor's, `addresses` a list for each of the last columns of `known`.

        `reduces` has the kind of each reduction (0 sum, 1 minimum, 2 maximum), and "row" or "column" where it leaves a
        number for each of these, as they lie in memory; "" where it leaves one for each tensor.
        """
        self.launch, self.count = launch, sum(counts[0] for _, counts in cuts)
        chunks = [(i, number) for i, (_, counts) in enumerate(cuts) for number in range(counts[0])]
        self.chunks = torch.tensor(chunks, dtype=torch.int32).to(device)
        known, jobs, slot, ends = [[*columns] for columns, _ in cuts], [], 0, [0]
        for kind, place in reduces:
            to = ends[-1]
            for line, cut in zip(known, cuts, strict=True):
                size, count = slots_of(place, *cut)
                line.append(slot)
                jobs += joins(kind, size, count, slot, to)
                slot, to = slot + size * count, to + size
            ends.append(to)
        for line, *at in zip(known, *addresses, strict=True):
            line += at
        self.known, self.jobs, self.joined = torch.tensor(known).to(device), torch.tensor(jobs).to(device), len(jobs)
        self.slots = [torch.empty(slot, dtype=torch.float64, device=device)] * bool(reduces)
        self.results = torch.empty(ends[-1], dtype=torch.float64, device=device)
        self.reduced = [self.results[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def __call__(self, moving, table):
        """Runs the kernel, and joins what its chunks reduce: a vector of float64 for each reduction."""
        self.launch(self.count, self.chunks, self.known, moving, table, None, None, *self.slots)
        if self.joined:
            FINISH(self.joined, self.jobs, *self.slots, self.results)
        return self.reduced


def slots_of(place, columns, counts):
    """The number of results of a reduction of one tensor, and of the slots that are joined to each."""
    if not place:
        return 1, counts[0]
    return (columns[0] * columns[1], counts[1]) if place == "row" else (columns[0] * columns[2], counts[2])


def joins(kind, size, count, slot, to):
    """Lines of `jobs` for the kernel `finish`: a lane for each result, or all lanes for one of many slots."""
    one = size == 1 or count > 64
    rounds, apart, step = (-(-count // 256), 256 * size, size) if one else (count, size, 1)
    return [
        (kind, one, slot + done, to + done, rounds, apart, step, count if one else min(size - done, 256))
        for done in range(0, size, 1 if one else 256)
    ]
'''

UPLOADS = '''\
class Uploads:
    """The numbers of a step: written in pinned memory, in one of four parts by turns, and copied to the device once."""

    def __init__(self, device, count, moving, columns):
        """Tables of `count` lines: for each stage one with so many columns of `moving`, and one of float64."""
        self.gpu, self.turn = device.type == "cuda", 0
        self.sizes = [-(-count * n // 2) * 2 for n in (*moving, columns)]
        self.shape = count, moving, columns
        kind = {"size": (4 if self.gpu else 1, sum(self.sizes)), "dtype": torch.int64}
        self.parts = torch.zeros(**kind, pin_memory=self.gpu).unbind()
        self.host = [self.tables(part) for part in self.parts]
        self.words = torch.empty_like(self.parts[0], device=device) if self.gpu else self.parts[0]
        self.there = self.tables(self.words)
        self.events = [torch.cuda.Event() for _ in self.parts] if self.gpu else []
        for each, _ in self.host:
            for table in each:
                table[:, 0] = torch.arange(count)

    def tables(self, words):
        """The tables in some words: the stages' in a list, and the one of float64."""
        count, moving, columns = self.shape
        parts = words.split(self.sizes)
        each = [part[: count * n].view(count, n) for part, n in zip(parts, moving)]
        return each, parts[-1][: count * columns].view(torch.float64).view(count, columns)

    def begin(self):
        """The tables to write. The copy of four steps before is waited for, which has long been made."""
        self.turn = (self.turn + 1) % len(self.host)
        if self.gpu:
            self.events[self.turn].synchronize()
        return self.host[self.turn]

    def copy(self):
        """The tables on the device, after a copy."""
        if self.gpu:
            self.words.copy_(self.parts[self.turn], non_blocking=True)
            self.events[self.turn].record()
        return self.there
'''

BATCH = '''\
def joined(states, name, dtype, device):
    """One vector with a state of all tensors, whose states become its parts."""
    parts = [torch.as_tensor(state[name]) for state in states]
    whole = torch.cat([part.detach().reshape(-1).to(device, dtype) for part in parts])
    for state, part, new in zip(states, parts, whole.split([part.numel() for part in parts]), strict=True):
        state[name] = new.view(part.shape)
    return whole


class Batch:
    """Tensors of one device, and all about them that is the same from step to step."""

    #: The states that are looked at before a step: where one lies elsewhere, the tables are made anew.
    names = ()

    def __init__(self, tensors):
        """`tensors` has a parameter, its states, the number of its group, and its own number."""
        self.params, self.states, groups, numbers = (list(x) for x in zip(*tensors, strict=True))
        self.device, self.group = self.params[0].device, torch.tensor(groups)
        self.sizes, self.values = [p.numel() for p in self.params], None
        self.steps = joined(self.states, "step", torch.float32, "cpu")
        <seeded?>self.tensor_number = torch.tensor(numbers).double() % 2**24

    def places(self):
        """Where parameters and states lie."""
        arrays = [*self.params, *[state[name] for state in self.states for name in self.names]]
        return [*map(torch.Tensor.data_ptr, arrays)]

    def at(self, name):
        """The address of a state of each tensor."""
        return [state[name].data_ptr() for state in self.states]

    def hyper(self, groups):
        """The hyper-parameters by name, each a vector of float64 with the number of every tensor."""
        values = [group[name] for group in groups for name in HYPER]
        if values != self.values:
            known = torch.tensor([float(x) for x in values], dtype=torch.float64).view(len(groups), len(HYPER))
            self.known = dict(zip(HYPER, known[self.group].unbind(1), strict=True))
            self.values = values
        return self.known

    def gradients(self):
        """The gradients as kernels read them; TypeError or ValueError for others."""
        grads = [p.grad for p in self.params]
        if {(g.dtype, g.layout) for g in grads} != {(torch.<dtype>, torch.strided)}:
            raise TypeError("gradients must be <dtype>, and dense")
        if [*map(torch.Tensor.numel, grads)] != self.sizes:
            raise ValueError("a gradient must have the shape of its parameter")
        if any(map(torch.Tensor.is_neg, grads)) or not all(map(torch.Tensor.is_contiguous, grads)):
            grads = [g.resolve_neg().contiguous() for g in grads]
        return grads
'''

MATRICES = '''\
def matrices(shape):
    """A tensor as matrices: their number, rows and columns, and whether their rows are the columns in memory."""
    <flat?>batch, rows, cols = (1, shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 1, math.prod(shape))
    <last?>batch, rows, cols = (math.prod(shape[:-2]), *shape[-2:]) if len(shape) > 1 else (1, 1, math.prod(shape))
    <turns?>if rows > cols:
    <turns?>    return batch, cols, rows, True
    return batch, rows, cols, False
'''

KEPT = '''\
def kept(p, axes):
    """The shape of a state with a number for each matrix ("b") of a parameter, or each row ("bi") or column ("bj")."""
    batch, rows, cols, _ = matrices(p.shape)
    lines = (rows if "i" in axes else 1, cols if "j" in axes else 1)
    return (*p.shape[:-2], *lines) if math.prod(p.shape[:-2]) == batch else lines
'''

VECTORS = '''\
class Vectors(Batch):
    """Tensors as matrices. Numbers of all their matrices, rows or columns are one vector, tensor after tensor.

    The axes of a vector are "b" (a number for each matrix), "bi" (each row), "bj" (each column), or "bij".
    """

    def __init__(self, tensors):
        super().__init__(tensors)
        views = [matrices(p.shape) for p in self.params]
        self.extents, self.index, self.ends = [view[:3] for view in views], {}, {}
        #: The matrices as they lie in memory.
        self.lying = [(b, j, i) if turned else (b, i, j) for b, i, j, turned in views]
        <stacks?>self.alike = []
        <stacks?>for (batch, height, width), view in zip(self.lying, views, strict=True):
        <stacks?>    last = self.alike[-1] if self.alike else (0, 0, 0, False)
        <stacks?>    if last[1:] == (height, width, view[3]) and (last[0] + batch) * height * width <= 2**26:
        <stacks?>        self.alike[-1] = (last[0] + batch, *last[1:])
        <stacks?>    else:
        <stacks?>        self.alike.append((batch, height, width, view[3]))
        self.first, self.total = {}, {}
        for axes in ("b", "bi", "bj", "bij"):
            ends = torch.tensor([0, *[math.prod(self.shape(extents, axes)) for extents in self.extents]]).cumsum(0)
            self.first[axes], self.total[axes] = ends[:-1], int(ends[-1])

    @staticmethod
    def shape(extents, axes):
        """The extents of a tensor, with 1 for each of "bij" that is not among the axes."""
        return [n if axis in axes else 1 for axis, n in zip("bij", extents, strict=True)]

    def room(self, axes, dtype):
        """A new vector."""
        return torch.empty(self.total[axes], dtype=dtype, device=self.device)

    def parts(self, x, axes):
        """The address of each tensor's part of a vector."""
        return x.data_ptr() + x.element_size() * self.first[axes]

    def spread(self, x, before, after):
        """A vector with more axes; without any before, x has a number for each tensor."""
        if (before, after) not in self.index:
            parts, start = [], 0
            for extents in self.extents:
                shape = self.shape(extents, before)
                places = torch.arange(start, start + math.prod(shape)).view(shape)
                parts.append(places.expand(self.shape(extents, after)).reshape(-1))
                start += math.prod(shape)
            self.index[before, after] = torch.cat(parts).to(self.device)
        return x[self.index[before, after]]
'''

WITHIN = '''\
    def within(self, kind, x, before, after):
        """A vector reduced to fewer axes; to a number for each tensor without any after."""
        key = before, after
        if key not in self.ends:
            order, counts, start = [], [0], 0
            for extents in self.extents:
                shape = self.shape(extents, before)
                places = torch.arange(start, start + math.prod(shape)).view(shape)
                others = [k for k, axis in enumerate("bij") if axis not in after]
                places = places.permute(*[k for k in range(3) if k not in others], *others)
                runs = math.prod(self.shape(extents, after))
                counts += [places.numel() // max(runs, 1)] * runs
                order.append(places.reshape(-1))
                start += math.prod(shape)
            self.ends[key] = torch.cat(order).to(self.device), torch.tensor(counts).cumsum(0).to(self.device)
        order, ends = self.ends[key]
        results = x.new_empty(ends.numel() - 1)
        if results.numel():
            SEGMENTS[kind](results.numel(), x[order], ends, results)
        return results
'''

STACKS = '''\
def newton_schulz(x, steps, dtype):
    """The quintic iteration of Muon towards the nearest orthogonal matrices, of a stack."""
    y = x.to(dtype)
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    tall = y.shape[-2] > y.shape[-1]
    y = y.mT if tall else y
    for _ in range(steps):
        gram = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return (y.mT if tall else y).to(x.dtype)
'''

STACKED = '''\
    def stacks(self, x):
        """The matrices in a vector of all elements, in one stack for the neighbouring tensors of each shape."""
        stacks, first = [], 0
        for batch, height, width, turned in self.alike:
            count = batch * height * width
            stack = x[first : first + count].view(batch, height, width)
            stacks.append(stack.mT if turned else stack)
            first += count
        return stacks

    def vector(self, arrays, dtype):
        """Arrays of all elements of each tensor, copied into one vector."""
        whole = self.room("bij", dtype)
        torch._foreach_copy_([*whole.split(self.sizes)], [x.reshape(-1) for x in arrays])
        return whole
'''

TOGETHER = '''\
def together(updates):
    """Runs updates side by side. Each yields its part of a reduction over all tensors, and is sent the whole."""
    parts = [next(update) for update in updates]
    while parts and parts[0] is not None:
        kind, first = parts[0]
        whole = kind(torch.stack([x.to(first.device) for _, x in parts]), 0)
        parts = [update.send(whole.to(x.device)) for update, (_, x) in zip(updates, parts, strict=True)]
'''
