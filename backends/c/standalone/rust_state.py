"""Prints the types of a module in Rust: an enum of statuses, and a struct that owns the states of a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rulec.language.expr.text import expression_text

from ...cstyle.dialect import indented
from .model import STATUSES, CFile
from .rust_words import REALS, WIDTH, arguments, call, named, own_parameters, quoted, signature

#: The statuses of this module alone, and their meanings.
_OTHERS = (
    ("BadLength { slice: &'static str, expected: usize, length: usize }", "a slice is not as long as its tensor"),
    ("OtherFile", "the C file is not the one of this module"),
)

_TYPES = """\
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            <displayed>
            Status::BadLength {
                slice,
                expected,
                length,
            } => write!(
                f,
                "the length of {slice} is {length}, and must be {expected}; nothing was written"
            ),
            Status::OtherFile => f.write_str(
                "<name>.c and <name>.rs were not written together: write both anew",
            ),
        }
    }
}

impl std::error::Error for Status {}

fn checked(status: c_int) -> Result<(), Status> {
    match status {
        0 => Ok(()),
        <mapped>
        _ => Err(Status::OtherFile),
    }
}

/// A part of a state block, so that the block begins at a multiple of 64 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// What the state block of this rule begins with.
const MAGIC: u64 = <magic>;

/// The largest product of extents: the bytes of a state block are below `isize::MAX` then.
const MOST: usize = isize::MAX as usize / <per>;

/// The states of one tensor and the steps so far, in memory of their own.
#[derive(Clone)]
pub struct State {
    block: Vec<Line>,
    <extents_field>
    count: usize,
}

impl State {
    <new>

    /// The state that `as_bytes` gave the bytes of, for a tensor of this shape.
    ///
    /// `Status::BadLength` or `Status::BadState` where the bytes are of another rule or size. A step
    /// checks the rest of the shape.
    pub fn from_bytes(shape: &[usize], bytes: &[u8]) -> Result<Self, Status> {
        let (mut state, expected) = Self::sized(shape)?;
        check_length("bytes", expected * 64, bytes.len())?;
        state.allocate(expected)?;
        for (line, part) in state.block.iter_mut().zip(bytes.chunks_exact(64)) {
            line.0.copy_from_slice(part);
        }
        // Far below the number to which no 1 can be added.
        if !(0..1 << 62).contains(&state.steps()) {
            return Err(Status::BadState);
        }
        Ok(state)
    }

    /// The whole state as plain bytes, for a checkpoint on machines of the same order of bytes.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: lines are bytes without gaps, all of them initialised.
        unsafe { std::slice::from_raw_parts(self.block.as_ptr().cast(), self.block.len() * 64) }
    }

    /// The steps so far.
    pub fn steps(&self) -> i64 {
        // SAFETY: the block has at least the bytes of its head, whatever their values.
        unsafe { <name>_steps(self.block.as_ptr().cast()) }
    }

    /// The number of elements of the tensor.
    pub fn count(&self) -> usize {
        self.count
    }

    /// A state without memory for a tensor of this shape, and the lines of memory that it needs.
    fn sized(shape: &[usize]) -> Result<(Self, usize), Status> {
        let mut most = 1_usize;
        for &extent in shape {
            most = most.saturating_mul(extent.max(1));
        }
        if most > MOST || shape.len() > c_int::MAX as usize {
            return Err(Status::NoMemory);
        }
        let state = State {
            block: Vec::new(),
            <extents_value>
            count: shape.iter().product(),
        };
        // SAFETY: the function reads its arguments alone, and their product is not too large.
        <bytes>
        if bytes == 0 {
            return Err(Status::BadShape);
        }
        Ok((state, bytes.div_ceil(64)))
    }

    fn allocate(&mut self, lines: usize) -> Result<(), Status> {
        if self.block.try_reserve_exact(lines).is_err() {
            return Err(Status::NoMemory);
        }
        self.block.resize(lines, Line([0; 64]));
        Ok(())
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("count", &self.count)
            .field("steps", &self.steps())
            .finish_non_exhaustive()
    }
}

fn check_length(slice: &'static str, expected: usize, length: usize) -> Result<(), Status> {
    if length == expected {
        return Ok(());
    }
    Err(Status::BadLength {
        slice,
        expected,
        length,
    })
}
"""

_NEW = """\
/// The first values of the states, and no steps, for a tensor of this shape.
<takes>
    let (mut state, lines) = Self::sized(shape)?;
    check_length("param", state.count, param.len())?;
    state.allocate(lines)?;
    // SAFETY: the block has the bytes that the C file asks for, and param has count elements.
    <called>
    let Line(first) = state.block[0];
    if !first.starts_with(&MAGIC.to_ne_bytes()) {
        return Err(Status::OtherFile);
    }
    Ok(state)
}"""


def state_text(file: CFile) -> str:
    """The enum of statuses with their messages, and the struct of a tensor's states."""
    shown = [line for name, text in _variants() for line in _shown(file, name, text)]
    mapped = [f"{i} => Err(Status::{name})," for i, (name, _) in enumerate(_variants(), 1)]
    per = 16 * (1 + sum(len(file.fields_of(state)) for state in file.all_arrays()))
    extents = ["extents: Vec<i64>,"] if file.shaped else []
    values = ["extents: shape.iter().map(|&extent| extent as i64).collect(),"] if file.shaped else []
    parts = {"displayed": shown, "mapped": mapped, "extents_field": extents, "extents_value": values, "new": _new(file),
             "bytes": _bytes(file)}  # fmt: skip
    text = f"{_statuses()}\n\n{_filled(_TYPES, parts)}"
    for key, value in (("name", file.name), ("magic", str(file.magic)), ("per", str(per))):
        text = text.replace(f"<{key}>", value)
    return text


def _statuses() -> str:
    """The statuses of the C functions, and of this module."""
    lines = [line for name, text in _variants() for line in (f"/// {text}", f"{name},")]
    others = [line for name, text in _OTHERS for line in (f"/// {text}", *_variant(name))]
    return "\n".join(
        ["/// Why a function has done nothing.", "#[derive(Clone, Copy, Debug, PartialEq, Eq)]", "pub enum Status {",
         *indented([*lines, *others]), "}"]
    )  # fmt: skip


def _variant(text: str) -> list[str]:
    name, brace, fields = text.rstrip(" }").partition(" { ")
    return [f"{name} {{", *indented([f"{x}," for x in fields.split(", ")]), "},"] if brace else [f"{name},"]


def _variants() -> list[tuple[str, str]]:
    """The names and meanings of the C functions' statuses, from 1."""
    return [("".join(x.capitalize() for x in key.split("_")), text) for key, text in STATUSES[1:]]


def _filled(text: str, parts: Mapping[str, Sequence[str]]) -> str:
    """A text with the lines of `parts` in the place of a line `<key>`, as far to the right as that line."""
    lines = []
    for line in text.split("\n"):
        part = parts.get(line.strip().strip("<>")) if line.strip().startswith("<") else None
        indent = line[: len(line) - len(line.lstrip())]
        lines += [line] if part is None else [f"{indent}{x}".rstrip() for x in part]
    return "\n".join(lines)


def _shown(file: CFile, name: str, text: str) -> list[str]:
    """The branch of `Display` for a status: its meaning, and the ranges or the condition of this rule."""
    h = file.family.rule.hyper
    ranges = [f"{named(field)} {h[key].range_text()}" for key, field in file.hyper.items() if h[key].range_text()]
    applies = file.family.applies
    more = {
        "BadHyper": f" ({'; '.join(ranges)})" * bool(ranges),
        "BadShape": "" if applies is None else f" (it applies where {expression_text(applies)})",
    }.get(name, "")
    return [f"Status::{name} => {{", f"    f.write_str({quoted(f'{text}{more}; nothing was written')})", "}"]


def _bytes(file: CFile) -> list[str]:
    """The statement that asks for the size of a state block, as rustfmt has it."""
    call = f"unsafe {{ {file.name}_state_bytes({', '.join(arguments(file, 'state_bytes', 'state'))}) }};"
    if len(call) <= WIDTH - 20:
        return [f"let bytes = {call}"]
    if len(call) <= WIDTH - 12:
        return ["let bytes =", f"    {call}"]
    return ["let bytes = unsafe {", f"    {call.removeprefix('unsafe { ').removesuffix(' };')}", "};"]


def _new(file: CFile) -> list[str]:
    """The function that makes a state."""
    takes = ["hyper: &Hyper", "shape: &[usize]", f"param: &[{REALS[file.real]}]"]
    takes += [f"{name}: i64" for name, _ in own_parameters(file, "init", ("param",))]
    head = signature("pub fn new", takes, " -> Result<Self, Status> {", 4)
    return _filled(_NEW, {"takes": head, "called": call(file, "init", "?;")}).split("\n")
