"""The capabilities of a backend as tests: each beside its definition on the host.

Numbers are chosen so that results are exact, and every bit is compared: whole numbers and their products. The others
have their bounds here. `rulec.testing.conformance` runs all of them; `on_device` is checked there, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, get_args

import numpy as np

import rulec
from rulec.array.arrays import numpy_dtype
from rulec.array_api import random as streams
from rulec.backend.capabilities import (
    DTYPES,
    MEMBERS,
    Bits,
    Capabilities,
    Noise,
    Product,
    QuinticProducts,
    Values,
    Window,
    capabilities_of,
    lacking,
)
from rulec.backend.protocol import Kernel, Rows
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, layout_for, scheduled
from rulec.compiler.memory import narrowed
from rulec.errors import BackendUnsupported
from rulec.es.binary.kernels import ReferenceKernels, pack
from rulec.es.streams import Stream, short_weights
from rulec.formats import NAMES, Format, decode, encode, parse
from rulec.language.expr.node import Op
from rulec.runtime.storage.quantized import DeviceFormats
from rulec.testing.cases import buckets_of, gradients, hyper_values, loaded, parameters
from rulec.testing.interval import Array
from rulec.testing.kinds import EPS, NumpyKind
from rulec.testing.trial import Subject, Trial

VALUES: tuple[Values, ...] = get_args(Values)

#: Elements at which noise begins: within a block, and where blocks' numbers are about to need more than 32 bits.
OFFSETS = (0, 37, 16 * 2**32 - 128)

#: The rules of one elementwise stage that kernels for gradients of another form are tried with.
RULES = ("sgd", "adamw")

#: Sizes of matrices, one of which a backend's products are for.
MATRICES = ((40, 70), (64, 96), (256, 264), (512, 520))


def check_capabilities(subject: Subject) -> list[str]:
    """MUST have each capability that it offers, as its contract says. Returns their names.

    AssertionError where only some members of one are there, and where one has other results than its definition.
    """
    for capability, members in MEMBERS.items():
        missing = lacking(subject.backend, capability)
        if missing and len(missing) < len(members):
            there = " and ".join(m for m in members if m not in missing)
            raise _fault(subject, capability, f"the backend has {there} and no {' and no '.join(missing)}")
    capabilities = capabilities_of(subject.backend)
    for name in capabilities.names:
        check = CHECKS.get(name)
        fault = None if check is None else _tried(subject, capabilities, check)
        if fault is not None:
            raise _fault(subject, name, fault)
    return capabilities.names


def _fault(subject: Subject, capability: str, sentence: str) -> AssertionError:
    return AssertionError(f"backend {subject.backend.name!r}, capability {capability!r}: {sentence}")


def _tried(subject: Subject, capabilities: Capabilities, check: Check) -> str | None:
    """The first fault of a capability, in words, or the error that the backend raises."""
    try:
        return next(check(subject, capabilities), None)
    except AssertionError as error:
        return str(error).removeprefix(f"backend {subject.backend.name!r}, ")
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        return f"it raises {type(error).__name__}: {error}"


#: A check gives a sentence for each fault.
Check = Callable[[Subject, Capabilities], Iterator[str]]


def noise_of(values: Values, directions: int = 3, layer: int = 3) -> Noise:
    """Noise of so many directions, the second of which counts for nothing."""
    drawn = np.random.default_rng(directions).standard_normal(directions)
    drawn[1:2] = 0.0
    return Noise(values, -5, layer, 2**32 - 1, short_weights(drawn, values), first=2**31 - 1, purpose=1)


def summed(noise: Noise, count: int, offset: int, dtype: str) -> Array:
    """The noise as it is defined: summed in float64 for an array of that, else in float32, and rounded once."""
    real = np.dtype("float64" if dtype == "float64" else "float32")
    total = np.zeros(count, real)
    for d, weight in enumerate(noise.weights):
        stream = Stream(noise.seed, noise.layer, noise.step, noise.first + d, noise.purpose)
        normal = noise.values == "normal"
        each = stream.values("normal", count, offset) if normal else stream.whole(noise.values, count, offset)
        total += weight.astype(real) * each.astype(real)
    return np.asarray(total.astype(numpy_dtype(dtype)))


def _is_noise(result: Array, noise: Noise, offset: int) -> bool:
    """Whether an array has this noise: every bit of whole numbers, and normal numbers to 16 ulps of 1."""
    wanted = summed(noise, result.size, offset, result.dtype.name)
    if noise.values != "normal":
        return result.tobytes() == wanted.tobytes()
    error = np.abs(result.astype(np.float64) - wanted.astype(np.float64)).max()
    return bool(error <= 16 * EPS[result.dtype.name] * np.abs(noise.weights).sum())


def _fill_noise(subject: Subject, capabilities: Capabilities) -> Iterator[str]:
    fill, kind = capabilities.fill_noise, subject.kind
    assert fill is not None
    for dtype in kind.dtypes:
        for values in VALUES:
            for offset in OFFSETS:
                out = kind.make(np.full(300, np.nan, numpy_dtype(dtype)))
                fill(out, noise_of(values), offset)
                if not _is_noise(kind.read(out), noise_of(values), offset):
                    yield f"{values} in {dtype} from element {offset} on is not the noise of its stream"


def _fill_lines(subject: Subject, capabilities: Capabilities) -> Iterator[str]:
    fill, kind, pairs = capabilities.fill_lines, subject.kind, (2, 0, 2**31 + 5)
    assert fill is not None
    for dtype in kind.dtypes:
        for values in VALUES:
            out, noise = kind.make(np.full((len(pairs), 70), np.nan, numpy_dtype(dtype))), noise_of(values, 1)
            fill(out, noise, pairs, 37)
            for line, first in zip(kind.read(out), pairs, strict=True):
                if not _is_noise(line, replace(noise, first=first), 37):
                    yield f"{values} in {dtype} of direction {first} is not the noise of its stream"


def _estimate(subject: Subject, capabilities: Capabilities) -> Iterator[str]:
    kernels, fill, tried = capabilities.estimate, capabilities.fill_noise, 0
    assert kernels is not None
    shapes = ((1,), (33, 40), (7,))
    for rule in RULES:
        program = rulec.compile(loaded(rule))
        for dtype in (subject.kind.dtypes[0], subject.kind.dtypes[-1]):
            layout = layout_for(program, dtype, maximize=rule == RULES[0])
            for values in VALUES:
                noises = [noise_of(values, 3, layer) for layer in range(len(shapes))]
                try:
                    kernel = kernels.build_estimate(
                        program, layout, values, kernels.emit_estimate(program, layout, values)
                    )
                except BackendUnsupported:
                    continue
                tried += 1
                grads = [
                    subject.kind.make(summed(noise, math.prod(shape), 0, dtype).reshape(shape))
                    for noise, shape in zip(noises, shapes, strict=True)
                ]
                if values == "normal":
                    if fill is None:
                        continue
                    for gradient, noise in zip(grads, noises, strict=True):
                        fill(gradient, noise)
                if _differ(subject, program, layout, shapes, kernel, noises, grads):
                    yield f"{rule} in {dtype} by {values} noise has other bits than by a gradient of this noise"
    if not tried:
        yield f"it refuses {' and '.join(RULES)} for every kind of noise"


def _epilogue(subject: Subject, capabilities: Capabilities) -> Iterator[str]:
    kernels, kind, tried = capabilities.epilogue, subject.kind, 0
    assert kernels is not None
    random = np.random.default_rng(3)
    outputs, inputs = (random.integers(-30, 31, (37, size)).astype(np.float64) for size in (33, 40))
    for rule in RULES:
        program = rulec.compile(loaded(rule))
        layout = layout_for(program, "float32")
        for factors in kind.dtypes:
            try:
                source = kernels.emit_epilogue(program, layout, factors)
                kernel = kernels.build_epilogue(program, layout, factors, source)
            except BackendUnsupported:
                continue
            tried += 1
            dtype = numpy_dtype(factors)
            product = Product(kind.make(outputs.astype(dtype)), kind.make(inputs.astype(dtype)))
            gradient = kind.make((outputs.T @ inputs).astype(dtype).astype(np.float32))
            if _differ(subject, program, layout, [(33, 40)], kernel, [product], [gradient]):
                yield f"{rule} by a product of {factors} has other bits than by the rounded product as its gradient"
    if not tried:
        yield f"it refuses {' and '.join(RULES)} for factors of every dtype"


def _differ(
    subject: Subject, program: Program, layout: Layout, shapes: Sequence[tuple[int, ...]], kernel: Kernel,
    sources: Sequence[Any], grads: Sequence[Any],
) -> bool:  # fmt: skip
    """Whether a kernel leaves other bits by sources of gradients than the program's kernel does by gradients."""
    results = []
    for each, moving in ((kernel, sources), (subject.kernel(program, layout), grads)):
        random = np.random.default_rng(1)
        params, *states = (
            [subject.kind.make(random.random(s).astype(numpy_dtype(layout.dtype(name)))) for s in shapes]
            for name in ("p", *(b.name for b in program.states))
        )
        names = [b.name for b in program.states]
        named = [dict(zip(names, each_state, strict=True)) for each_state in zip(*states, strict=True)]
        table = np.random.default_rng(0).uniform(0.1, 0.9, (2, len(program.columns)))
        call = each.bind(params, named or [{} for _ in shapes])
        written = call(0, moving, Rows(table, np.ones(len(shapes), np.int64)))
        arrays = [*written.params, *(x for state in written.states for x in state.values())]
        results.append([subject.kind.read(x).tobytes() for x in arrays])
    return results[0] != results[1]


def _quintic(subject: Subject, capabilities: Capabilities) -> Iterator[str]:
    kernels = capabilities.quintic
    assert kernels is not None
    device = getattr(subject.kind.make(np.zeros(1, np.float32)), "device", None)
    if not kernels.has_quintic(device):
        return
    # One dtype has wide matrices and the other tall ones: in an interpreter of kernels such products take seconds.
    for dtype, turns in zip(DTYPES, (1, -1), strict=True):
        try:
            products = kernels.build_quintic(dtype, kernels.emit_quintic(dtype))
        except BackendUnsupported:
            continue
        for rows, cols in [size[::turns] for size in MATRICES if products.pays(*size[::turns])][:1]:
            for name, same in _products(subject, products, dtype, (2, rows, cols)):
                if not same:
                    yield f"{name} of {rows} by {cols} matrices in {dtype} is not the exact one rounded once"


def _products(
    subject: Subject, products: QuinticProducts, dtype: str, shape: tuple[int, int, int]
) -> Iterator[tuple[str, bool]]:
    """The products by name, and whether each has the bits of the exact one of whole numbers, rounded once."""
    kind, stored, side = subject.kind, numpy_dtype(dtype), min(shape[1:])
    random = np.random.default_rng(sum(shape))
    y = random.integers(-3, 4, shape).astype(np.float64)
    lower = np.tril(random.integers(-3, 4, (shape[0], side, side))).astype(np.float64)
    square = lower + np.tril(lower, -1).transpose(0, 2, 1)
    norms = random.integers(1, 30, (shape[0], 1, 1)).astype(np.float64)
    first, second = _commuting(random, side), _commuting(random, side)
    turned, tall = y.transpose(0, 2, 1), shape[1] > shape[2]
    a, b, c = 1.5, -0.5, 0.25
    array, gram, over, one, other = (kind.make(x.astype(stored)) for x in (y, square, norms, first, second))
    pairs = {
        "gram": (products.gram(array), turned @ y if tall else y @ turned),
        "polynomial": (products.polynomial(gram, b, c), b * square + c * square @ square),
        "product of two": (products.multiplied(one, other, a), a * first + first @ second),
        "following": (products.following(array, gram, a), a * y + (y @ square if tall else square @ y)),
        "divided": (products.divided(array, over), y / norms),
    }
    for name, (result, exact) in pairs.items():
        yield name, kind.read(result).tobytes() == (exact.astype(np.float32) + 0.0).astype(stored).tobytes()


def _commuting(random: np.random.Generator, side: int) -> Array:
    """Symmetric circulant matrices of whole numbers `(2, side, side)`, all of which commute."""
    lines = random.integers(-3, 4, (2, side)).astype(np.float64)
    distance = np.abs(np.subtract.outer(np.arange(side), np.arange(side)))
    return lines[:, np.minimum(distance, side - distance)]


def _segments(subject: Subject, capabilities: Capabilities) -> Iterator[str]:
    kernels = capabilities.segments
    assert kernels is not None
    by, lengths = kernels.build_segments(kernels.emit_segments()), (0, 1, 300, 2047, 2049, 0, 5000)
    values = np.random.default_rng(7).standard_normal(sum(lengths))
    values[301] = np.nan
    ends = np.cumsum([0, *lengths])
    runs = [values[first:last].tolist() for first, last in pairwise(ends)]
    exact: Mapping[Op, Callable[[list[float]], float]] = {
        Op.SUM: math.fsum, Op.MIN: lambda x: min(x, default=math.inf), Op.MAX: lambda x: max(x, default=-math.inf),
    }  # fmt: skip
    for op, reduce in exact.items():
        result = subject.kind.read(by(op, subject.kind.make(values), subject.kind.make(ends.astype(np.int64))))
        for run, number in zip(runs, result.tolist(), strict=True):
            wanted = math.nan if any(map(math.isnan, run)) else reduce(run)
            most = 2.0**-50 * math.fsum(map(abs, run)) if op is Op.SUM else 0.0
            if not (number == wanted or abs(number - wanted) <= most or (number != number and wanted != wanted)):
                yield f"{op.name.lower()} of {len(run)} numbers is {number}, and exactly {wanted}"


#: The counts of draws of several tensors: none, a part of a block, and more than one program may write.
_COUNTS = (0, 1, 300, 2049, 5)


def _draws(subject: Subject, capabilities: Capabilities) -> Iterator[str]:
    kernels, kind = capabilities.draws, subject.kind
    assert kernels is not None
    by, ends = kernels.build_draws(kernels.emit_draws()), kind.make(np.cumsum([0, *_COUNTS]))
    tensors = np.array([3, 2**31 + 5, -1, 0, 9])
    each: list[Any] = [2**32 - 1, np.array([5.75]), np.array([1.0, 2.5, 2.0**33 + 7, -4.5, 0.0])]
    for op, dtype, first, steps in product(
        (Op.NORMAL, Op.UNIFORM), ("float32", "float64"), (*OFFSETS[:2], 2**34 - 6), each
    ):  # fmt: skip
        out = kind.make(np.full(sum(_COUNTS), np.nan, dtype))
        known = steps if isinstance(steps, int) else kind.make(steps)
        by(op, out, ends, kind.make(tensors), known, most=max(_COUNTS), seed=-5, draw=2, first=first)
        result = np.split(kind.read(out), np.cumsum(_COUNTS)[:-1])
        at = np.broadcast_to(steps, (len(_COUNTS),))
        for numbers, tensor, step in zip(result, tensors, at, strict=True):
            if not _is_draw(op, numbers, first, {"seed": -5, "tensor": int(tensor), "draw": 2, "step": int(step)}):
                sort = op.name.lower()
                yield f"{len(numbers)} {sort} numbers in {dtype} from number {first} on are not those of the stream"


def _is_draw(op: Op, numbers: Array, first: int, position: Mapping[str, int]) -> bool:
    """Whether these are numbers of the stream: every bit of uniform ones, and normal ones to 16 ulps of 1."""
    block, before = divmod(first, streams.BLOCK)
    count = before + len(numbers)
    if op is Op.UNIFORM:
        wanted = streams.uniform(streams.stream(count, block=block, **position))[before:]
        return numbers.tobytes() == wanted.astype(numbers.dtype).tobytes()
    error = np.abs(numbers - streams.normal(count, block=block, **position)[before:])
    return bool(error.max(initial=0.0) <= 16 * EPS[numbers.dtype.name])


def _binary(subject: Subject, capabilities: Capabilities) -> Iterator[str]:
    assert capabilities.binary is not None
    kernels, reference = capabilities.binary(), ReferenceKernels()
    # In main memory they are NumPy's for every backend.
    kind = subject.kind if capabilities.on_device else NumpyKind()
    random = np.random.default_rng(5)
    window = Window(2, 3, (4, 5), 70, 3, kernel=(3, 2), stride=(1, 2), padding=(1, 1))
    inputs, weights = (pack(random.random((2, 3, *size, 70)) < 0.5) for size in ((4, 5), (3, 2)))
    thresholds = random.integers(0, 2**32, (5, 70), np.uint32)
    bits = Bits(-3, 1, 2**32 - 1, directions=2, signs=2)
    words, factors = reference.draw(thresholds, (5, 70), bits), random.standard_normal(4)
    pairs = {
        "convolve": (
            kernels.convolve(kind.make(inputs), kind.make(weights), window),
            reference.convolve(inputs, weights, window),
        ),
        "draw": (kernels.draw(kind.make(thresholds), (5, 70), bits), words),
        "weighted_sum": (
            kernels.weighted_sum(kind.make(words), factors, 70),
            reference.weighted_sum(words, factors, 70),
        ),
    }
    for name, (result, wanted) in pairs.items():
        if kind.read(result).tobytes() != wanted.tobytes():
            yield f"{name} has other bits than its definition"


def _decodes(subject: Subject, capabilities: Capabilities) -> Iterator[str]:
    formats, tried = DeviceFormats(subject.backend, capabilities.decodes), 0
    for form in (parse(name).for_state(signed=signed, floor=False) for name in NAMES for signed in (True, False)):
        if formats.has(form):
            tried += 1
            yield from _codes(subject, formats, form)
    if not tried:
        yield "it decodes no format"


def _codes(subject: Subject, formats: DeviceFormats, form: Format) -> Iterator[str]:
    """A sentence where values or codes of one format are other than the format's."""
    kind, rows = subject.kind, Rows(np.zeros((1, 0)), np.zeros(1, np.int64))
    values = np.random.default_rng(6).standard_normal(5003).astype(np.float32)
    values = values if form.signed else np.abs(values)
    codes, scales = encode(form, values)
    array, coded, scaled = kind.make(values), kind.make(np.zeros_like(codes)), kind.make(np.zeros_like(scales))
    state = formats.state(form, array, coded, scaled)
    state.encode(rows, None)
    if (kind.read(coded).tobytes(), kind.read(scaled).tobytes()) != (codes.tobytes(), scales.tobytes()):
        yield f"it encodes numbers otherwise than {form.key}"
    state.decode(rows, None)
    if kind.read(array).tobytes() != decode(form, codes, scales, values.shape).tobytes():
        yield f"it decodes codes otherwise than {form.key}"


def _narrow(subject: Subject, _: Capabilities) -> Iterator[str]:
    for bucket in buckets_of(loaded("muon"), ((8, 12), (33, 20))):
        program, layout = scheduled(bucket.program, layout_for(bucket.program, "float32"))
        layout = narrowed(program, layout)
        if not layout.results:
            continue
        hyper = hyper_values(bucket.rule, len(bucket.shapes))
        trial = Trial(subject, bucket.rule, program, layout, parameters(bucket.shapes, 0), hyper)
        for step in range(2):
            trial.step(gradients(bucket.shapes, step))
    yield from ()


def _assembly(subject: Subject, capabilities: Capabilities) -> Iterator[str]:
    assembly = capabilities.assembly
    assert assembly is not None
    texts = []
    for rule in RULES:
        program = rulec.compile(loaded(rule))
        source = subject.backend.emit(program, layout_for(program, subject.kind.dtypes[0]))
        texts.append(assembly(program.name, source))
    if len({*texts}) < len(RULES):
        yield f"its assembly of {' and '.join(RULES)} is the same"


#: Capability -> its check; `on_device` is checked with whole steps.
CHECKS: Mapping[str, Check] = {
    "narrow": _narrow,
    "decodes": _decodes,
    "estimate": _estimate,
    "fill_noise": _fill_noise,
    "fill_lines": _fill_lines,
    "epilogue": _epilogue,
    "quintic": _quintic,
    "segments": _segments,
    "draws": _draws,
    "binary": _binary,
    "assembly": _assembly,
}
