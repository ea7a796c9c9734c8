"""Files for torch with Triton's kernels: rules of several stages, the work of the host, and torch's checkpoints."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rulec
import rulec.torch
from rulec.standalone.cases import CannotBuild
from rulec.standalone.prose import hub_files, written
from tests.backends.triton_process import in_a_process
from tests.standalone.c_library import drawn
from tests.standalone.one_file import Array, Case, check_ran

#: Matrices, of odd sizes and of equal ones, of more dimensions, vectors, a number, and no elements.
SHAPES = ((33, 65), (5,), (40, 9), (33, 65), (2, 3, 4, 5), (), (1100,), (0,))
MATRICES = ((33, 65), (40, 9), (9, 40), (33, 65), (1, 7))

#: Rules of one stage and of several, with numbers, rows, columns, matrices and sums over all tensors.
RULES = {
    "adamw": SHAPES, "lamb": SHAPES, "adafactor": SHAPES, "adam_mini": SHAPES, "sm3": SHAPES, "came": SHAPES,
    "schedule_free_adamw": SHAPES, "clip_by_global_norm >> adamw": SHAPES, "muon": MATRICES, "normuon": MATRICES,
    "prodigy": SHAPES[1:], "adamc": SHAPES[1:],
}  # fmt: skip

#: Two groups; the rate of one changes, a gradient is missing in one step, and the states are saved and loaded.
PROGRAM = """
import copy
import numpy as np
import torch
import rule
kind = next(v for v in vars(rule).values() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer))


def tensor(array):
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


tensors = [torch.nn.Parameter(tensor(p)) for p in params]


def made():
    return kind([{"params": tensors[:2]}, {"params": tensors[2:], "lr": 0.003}])


optimizer = made()
for number, grads in enumerate(steps):
    for i, (p, grad) in enumerate(zip(tensors, grads, strict=True)):
        p.grad = None if number == 2 and i == 1 and not hasattr(kind, "eval") else tensor(grad)
    if number == 3:
        optimizer.param_groups[1]["lr"] = 0.01
    optimizer.step()
    if number == 1:
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = made()
        optimizer.load_state_dict(saved)
if hasattr(optimizer, "eval"):
    trained = [t.clone() for t in tensors]
    optimizer.eval()
    moved = [t.detach().clone() for t in tensors]
    assert any((a != b).any() for a, b in zip(trained, moved))
    optimizer.train()
    for a, b in zip(trained, tensors):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
leave([(t.view(torch.uint16) if t.dtype is torch.bfloat16 else t).numpy() for t in (x.detach() for x in tensors)])
"""


def stepped(rule: str, params: list[Array], steps: list[list[Array]]) -> list[torch.Tensor]:
    """The parameters after the same steps by rulec.torch's kernels for CPUs."""
    tensors = [torch.nn.Parameter(tensor(p)) for p in params]
    optimizer = rulec.torch.optimizer(rule)(
        [{"params": tensors[:2]}, {"params": tensors[2:], "lr": 0.003}], backend="cpu"
    )
    moves = rulec.load(rule).evaluate is not None
    for number, grads in enumerate(steps):
        for i, (p, grad) in enumerate(zip(tensors, grads, strict=True)):
            p.grad = None if number == 2 and i == 1 and not moves else tensor(grad)
        if number == 3:
            optimizer.param_groups[1]["lr"] = 0.01
        optimizer.step()
    if moves:
        optimizer.eval()
        optimizer.train()
    return [t.detach() for t in tensors]


def tensor(array: Array) -> torch.Tensor:
    """A tensor of an array, or of the bits of bfloat16."""
    found = torch.from_numpy(array.copy())
    return found.view(torch.bfloat16) if array.dtype == np.uint16 else found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_have_the_bits_of_rulecs_steps(dtype: str, tmp_path: Path) -> None:
    cases, wanted = [], []
    for rule, shapes in RULES.items():
        arrays, grads = drawn(5, shapes, 5)
        given = [[stored(x, dtype) for x in each] for each in (arrays, *grads)]
        cases.append(Case(rule, given[0], given[1:], dtype))
        wanted.append(stepped(rule, given[0], given[1:]))
    for case, left, expected in zip(cases, check_ran(tmp_path, "triton", PROGRAM, *cases), wanted, strict=True):
        for ours, theirs in zip(left, expected, strict=True):
            assert torch.equal(tensor(ours), theirs), case.rule
        moved = [not torch.equal(x, tensor(p)) for x, p in zip(expected, case.params, strict=True) if x.numel() > 4]
        assert all(moved) or case.rule == "prodigy", case.rule  # its first steps are small


def stored(array: Array, dtype: str) -> Array:
    """An array in a dtype; of bfloat16 its bits."""
    x = torch.from_numpy(np.array(array)).to(getattr(torch, dtype))
    return np.asarray((x.view(torch.uint16) if dtype == "bfloat16" else x).numpy())


#: A written file as a module.
MODULE = """
import linecache, sys, types
import rulec
from rulec.standalone.prose import written


def module_of(rule):
    ((_, text),) = written(rulec.load(rule), "triton", name="rule").items()
    module = types.ModuleType("rule")
    sys.modules["rule"] = module
    linecache.cache["rule.py"] = len(text), None, text.splitlines(True), "rule.py"  # where Triton reads kernels
    exec(compile(text, "rule.py", "exec"), module.__dict__)
    return module
"""

#: Calls of a steady step of `count` tensors, of Python and C, with kernels that do nothing; and launches.
COUNTED = """
import collections, json, sys, types
import torch
import rulec, rulec.torch
import rulec_backends.triton as backend
from rulec.standalone.prose import written

launches = collections.Counter()


class Compiled:
    def __init__(self, name):
        self.name = name

    def __getitem__(self, grid):
        launches[self.name] += 1
        return self.nothing

    def nothing(self, *arguments):
        pass


class Kernel:
    def __init__(self, name, kernel):
        self.name, self.arg_names = name, getattr(kernel, "arg_names", [])

    def __getitem__(self, grid):
        launches[self.name] += 1
        return lambda *arguments, **options: Compiled(self.name)


def file_of(rule):
    module = module_of(rule)
    every = [y for x in vars(module).values() for y in (x if isinstance(x, list) else [x])]
    for launch in (x for x in every if isinstance(x, module.Launch)):
        launch.kernel = Kernel(launch.kernel.__name__, launch.kernel)
    return module.Rule


of_text = backend._kernels
backend._kernels = lambda name, text: {key: Kernel(key, kernel) for key, kernel in of_text(name, text).items()}


def counted(kind, count, **options):
    params = [torch.nn.Parameter(torch.ones(8, 12)) for _ in range(count)]
    optimizer, calls = kind(params, **options), collections.Counter()

    def note(frame, event, argument):
        calls[event] += event in ("call", "c_call")

    for number in range(6):
        for p in params:
            p.grad = torch.ones_like(p)
        launches.clear()
        if number == 5:
            sys.setprofile(note)
        optimizer.step()
        sys.setprofile(None)
    return calls["call"] + calls["c_call"], dict(launches)


found = {}
for rule in RULES:
    ours = {count: counted(file_of(rule), count) for count in (10, 100)}
    theirs, _ = counted(rulec.torch.optimizer(rule), 10, backend="triton")
    found[rule] = [ours[10][0], ours[100][0], theirs, ours[10][1], ours[100][1]]
print(json.dumps(found))
"""


def test_a_step_makes_few_calls_whatever_the_number_of_tensors() -> None:
    rules = [*RULES, "nadam"]
    found: dict[str, Any] = in_a_process(f"RULES = {json.dumps(rules)}\n{MODULE}\n{COUNTED}", TRITON_INTERPRET="1")
    for rule, (few, many, theirs, launches, more) in found.items():
        assert few == many, rule
        assert few <= 2 * theirs, rule
        assert launches == more, rule
        assert all(count == 1 for name, count in launches.items() if "stage" in name), rule


MISSING = """
import copy, json
import torch
import rulec.torch

Rule, shapes = module_of("schedule_free_adamw").Rule, [(9, 7), (5,), (4,)]


def drawn(seed):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source) for shape in shapes]


def loaded(optimizer, groups):
    saved, again = optimizer.state_dict(), Rule(groups)
    again.load_state_dict(copy.deepcopy(saved))
    return again


def copied(optimizer, groups):
    return copy.copy(optimizer)


def moved(optimizer, groups):
    optimizer.eval()
    optimizer.train()
    return optimizer


def trained(kind, missing, change, **options):
    params = [torch.nn.Parameter(x) for x in drawn(0)]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]
    optimizer = kind(groups, **options)
    for number, absent in enumerate(missing):
        for i, (p, grad) in enumerate(zip(params, drawn(1 + number))):
            p.grad = None if i in absent else grad
        optimizer.step()
        if number == 2:
            optimizer = change(optimizer, groups)
    return params


def differing(change, missing):
    same = change if change is moved else lambda optimizer, groups: optimizer
    theirs = trained(rulec.torch.optimizer("schedule_free_adamw"), missing, same, backend="cpu")
    return not all(map(torch.equal, trained(Rule, missing, change), theirs))


WITHOUT = [[(0,), (2,), (1,), (0,), (2,)], [(), (1,), (0, 1), (0,), ()], [(1,), (0,), (0,), (1,), ()]]
wrong = [[f.__name__, x] for f in (lambda o, g: o, loaded, copied, moved) for x in WITHOUT if differing(f, x)]
averaged = torch.nn.Parameter(torch.ones(5))
averaged.grad = torch.ones(5)
plain = module_of("ema(adam)").Rule([averaged])
plain.step()
moved(plain, [])  # without numbers of groups
print(json.dumps(wrong))
"""


def test_numbers_of_groups_go_on_from_the_last_step_of_any_tensor() -> None:
    """A tensor without a gradient in the last step has them as well: in a checkpoint, a copy, and later steps."""
    assert in_a_process(f"{MODULE}\n{MISSING}", TRITON_INTERPRET="1") == []


REFUSED = """
import json
import torch
Rule, said = module_of("lamb").Rule, []
one = torch.ones(3, 4)
for p, grad in (
    (torch.ones(4, 3).t(), one), (torch.ones(6, 4)[::2], one), (one.double(), one.double()),
    (one, one.to_sparse()), (torch._neg_view(one.clone()), one),
):
    first = torch.nn.Parameter(torch.ones(5))
    first.grad = torch.ones(5)
    p = torch.nn.Parameter(p.detach())
    p.grad = grad
    optimizer = Rule([first, p])
    try:
        optimizer.step()
    except (TypeError, ValueError) as error:
        said.append(str(error))
    assert (first == 1).all() and not optimizer.state, "written"
results = []
whole = torch.arange(1.0, 13.0).view(3, 4)
gaps = torch.stack([whole, torch.full_like(whole, -9.0)], dim=-1).flatten(1)[:, ::2]
for grad in (whole.t().contiguous().t(), gaps, torch._neg_view(-whole), whole):
    assert torch.equal(grad, whole)
    p = torch.nn.Parameter(one.clone())
    p.grad = grad
    Rule([p], beta1=0.0, beta2=0.5, eps=1.0).step()
    results.append(p.detach())
assert all(torch.equal(x, results[-1]) for x in results) and (results[0] != 1).all()
print(json.dumps(said))
"""


def test_tensors_with_gaps_are_refused_and_gradients_with_gaps_are_read() -> None:
    contiguous = "parameters must be contiguous, and no negative views"
    assert in_a_process(f"{MODULE}\n{REFUSED}", TRITON_INTERPRET="1") == [
        contiguous, contiguous, "parameters must be float32, dense, and whole on one device",
        "gradients must be float32, and dense", contiguous,
    ]  # fmt: skip


#: torch's own class, its keywords, and the shapes of tensors it takes; the file goes on where it left.
TORCHS = {
    "adamw": ("AdamW", {"betas": (0.8, 0.95), "lr": 0.01}), "adam": ("Adam", {"lr": 0.02}), "nadam": ("NAdam", {}),
    "adagrad": ("Adagrad", {}), "rprop": ("Rprop", {}), "adafactor": ("Adafactor", {"lr": 0.02}),
    "muon": ("Muon", {"weight_decay": 0.2}),
}  # fmt: skip

GOING_ON = """
import copy
import torch
import rule
kind = next(v for v in vars(rule).values() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer))
theirs = [torch.nn.Parameter(torch.from_numpy(p.copy())) for p in params]
other = getattr(torch.optim, NAME)(theirs, **KEYWORDS)


def step(optimizer, tensors, grads):
    for p, grad in zip(tensors, grads, strict=True):
        p.grad = torch.from_numpy(grad.copy())
    optimizer.step()


for grads in steps[:3]:
    step(other, theirs, grads)
ours = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
optimizer = kind(ours)
optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
assert "betas" not in optimizer.param_groups[0]
for grads in steps[3:]:
    step(other, theirs, grads)
    step(optimizer, ours, grads)
for a, b in zip(ours, theirs):
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
again = kind(ours)
again.load_state_dict(optimizer.state_dict())
leave([])
"""


@pytest.mark.slow
@pytest.mark.parametrize("rule", TORCHS)
def test_a_checkpoint_of_torchs_class_is_loaded(rule: str, tmp_path: Path) -> None:
    name, keywords = TORCHS[rule]
    arrays, grads = drawn(7, MATRICES, 6)
    given = [[stored(x, "float32") for x in each] for each in (arrays, *grads)]
    program = GOING_ON.replace("NAME", repr(name)).replace("KEYWORDS", repr(keywords))
    check_ran(tmp_path, "triton", program, Case(rule, given[0], given[1:]))


@pytest.mark.parametrize("rule", ["lamb", "adafactor", "muon", "schedule_free_adamw", "clip_by_global_norm >> adamw"])
def test_rules_of_several_stages_are_tidy(rule: str) -> None:
    for dtype in ("float32", "bfloat16"):
        ((_, text),) = written(rulec.load(rule), "triton", dtype=dtype, name="mine").items()
        body = ast.parse(text).body
        named = [x.name for x in body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        assert len(named) == len(set(named)), "a name is defined twice"
        assert not [line for line in text.splitlines() if line != line.rstrip()]
        assert max(map(len, text.partition("class Batch")[2].splitlines())) <= 120
        imports = {x.names[0].name for x in body if isinstance(x, ast.Import)}
        assert imports <= {"math", "torch", "triton", "triton.language"}
        assert "rulec." not in text


def test_the_layout_of_the_hub_has_every_rule_for_triton() -> None:
    rule = rulec.load("muon")
    files = hub_files(rule, "triton", written(rule, "triton"))
    assert "kernel.Muon(model.parameters(), lr=1e-3)" in files["README.md"]


def test_the_other_form_of_newton_schulz_is_refused() -> None:
    with pytest.raises(
        CannotBuild, match="as a file for Triton: its newton_schulz has the form 'gram': leave that out"
    ):
        written(rulec.load("muon").in_form("gram"), "triton")


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("spel", "it iterates newton_schulz with other coefficients than Muon's"),
        ("shampoo", "it needs the matrix function transpose"),
        ("galore", "it needs the matrix function singular_vectors"),
        ("apollo", r"it draws random numbers \(normal\)"),
        ("sophia", "it needs the input hessian"),
        ("momo", "it needs the input loss"),
    ],
)
def test_what_no_file_for_triton_has(rule: str, why: str) -> None:
    with pytest.raises(CannotBuild, match=f"rulec build cannot write .* as a file for Triton: {why}"):
        written(rulec.load(rule), "triton")
