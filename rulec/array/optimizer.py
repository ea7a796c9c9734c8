"""`rulec.array.Optimizer`: any rule on plain arrays, in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rulec.array.checks import checked_hyper, checked_tags, flatten, matching_leaves
from rulec.array.loading import contents, loaded, restored
from rulec.array.step import ArrayEngine, ArrayEvaluations, PartialStep
from rulec.errors import RulecError, RuleError, TensorError, interrupted
from rulec.language.eval_point import to_evaluation, to_training
from rulec.language.evaluations import check_single
from rulec.language.hyper import AT_START
from rulec.language.inputs import LIKE_P, SCALAR, per_tensor
from rulec.language.library.load import load
from rulec.language.rule import Rule
from rulec.language.rule_data import RuleData
from rulec.language.sizes import sized
from rulec.language.statistics import Watch
from rulec.locks import Lockable, synchronized
from rulec.runtime.buckets.scalar_table import Numbers
from rulec.runtime.engine import EPS, default_hyper, run
from rulec.runtime.statistics import StepStatistics, WatchSchedule
from rulec.runtime.storage.options import Storage

#: Types that hyper-parameters nearly always have.
_NUMBERS = frozenset({float, int})


class Optimizer(Lockable):
    """Updates NumPy or CuPy arrays in place by a rule, with no copy of a parameter, gradient or state.

    `rule` is a Rule, a library name or a path; `params` an array, or lists and dicts of arrays, nested (float32,
    float64, float16, or ml_dtypes' bfloat16; contiguous, writable, disjoint, those of CuPy on one GPU). `state_dtype`
    gives the storage of states by name, or of all: a dtype, a format, or `bfloat16_sr`. `weights` is the kind of arrays
    of 16 bits in memory: `split`, `split24`, `master`, `kahan`, `stochastic`, or empty for plain ones. `tags` has words
    for arrays by name, for rules with `tagged(...)`, as in `tags={"embed/weight": {"embedding"}}`; `seed` is that of
    the rule's random numbers and of rounding. `watch` are statistics to measure in the first of every `watch_every`
    steps: 'norms', a name that the rule declares, names, or expressions by name; `statistics()` has them.
    Further keywords are hyper-parameters; `opt.hyper["lr"] = 0.1` changes one.

    Each array has states of its own and counts its own updates. Raises TensorError, HyperError or BackendUnavailable
    before anything is written.
    """

    def __init__(
        self, rule: Rule | str | Path, params: Any, backend: str | None = None, *,
        state_dtype: str | Mapping[str, str] | None = None, weights: str = "", maximize: bool = False, seed: int = 0,
        tags: Mapping[str, Collection[str]] | None = None, watch: Watch | None = None, watch_every: int = 1,
        **hyper: float,
    ) -> None:  # fmt: skip
        self.rule, hyper = sized(rule if isinstance(rule, Rule) else load(rule), hyper)
        default_hyper(self.rule, hyper)
        leaves = flatten(params)
        dtypes = {"": state_dtype} if isinstance(state_dtype, str) else state_dtype
        words = checked_tags(tags or {}, [*leaves])
        schedule = WatchSchedule.of(f"rulec.array.Optimizer of {self.rule.name}", watch, watch_every)
        engine = ArrayEngine(
            self.rule, leaves, words, backend, dtypes, maximize, seed, weights, watch if schedule else None, schedule
        )
        Storage(engine.state_dtype, weights).check_weights(map(engine.arrays.dtype, leaves.values()))
        self._begin(engine)
        # Where a default is the machine epsilon, that of the coarsest dtype: there is one value for all arrays.
        coarsest = max(map(self._engine.arrays.dtype, leaves.values()), key=EPS.__getitem__, default="float32")
        self.hyper = default_hyper(self.rule, hyper, coarsest)
        self._training = True

    def _begin(self, engine: ArrayEngine) -> None:
        """Begins over the arrays of an engine, with no step open."""
        self._engine, self.names = engine, [*engine.params]
        self._open: PartialStep | None = None
        self._passes: ArrayEvaluations | None = None
        self._broken: PartialStep | None = None

    @synchronized
    def __getstate__(self) -> dict[str, Any]:
        self._check_closed("a copy")
        self._hyper_table()  # no copy can be made with wrong ones
        return {"rule": self.rule, "hyper": self.hyper, "training": self._training, **contents(self._engine)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.rule, self.hyper, self._training = state["rule"], state["hyper"], state["training"]
        self._begin(restored(self.rule, self.hyper, state))

    def step(self, grads: Any, *, gradient: Callable[[], Any] | None = None, **inputs: Any) -> None:
        """One step in place. `grads` has the structure of the parameters; None leaves an array as it is.

        `inputs` gives what the rule names under `inputs`: a number, or arrays in the structure of the parameters. Of a
        rule that evaluates the model again in a step, `gradient` gives the gradients where the arrays are then. An
        exception in it puts them back.
        """
        turn = self._lock
        turn.acquire()  # in half the time of a `with` block
        try:
            if self._engine.passes.count:
                self._step_by_passes(grads, gradient, inputs)
                return
            self._check_closed("step()", "use update(layer, grad) there, or close it first")
            self._check_training()
            leaves = matching_leaves(grads, self.names, "the gradient")
            self._fire(leaves, self._inputs(inputs, leaves))
        finally:
            turn.release()

    # Passes

    @synchronized
    def next_pass(self, grads: Any, **inputs: Any) -> bool:
        """Moves the arrays to the next point of a rule that evaluates the model again in a step.

        `grads` are the gradients where the arrays are now. True: give the gradients at the point to the next call.
        False: the arrays are back, and `step(grads)` follows. Of any other rule, and in a step without passes, False at
        once. An error puts the arrays back, as `put_back()` does.
        """
        if not self._engine.passes.count:
            return False
        try:
            leaves = matching_leaves(grads, self.names, "the gradient")
            if self._passes is None or self._passes.closed:
                self._check_closed("next_pass()")
                self._check_training()
                self._passes = ArrayEvaluations(self._engine, self._hyper_table(), leaves)
            return self._passes.next(leaves, self._inputs(inputs, leaves))
        except BaseException:
            self.put_back()
            raise

    @synchronized
    def put_back(self) -> None:
        """Ends the passes of a step without it: the arrays are where they were before the first."""
        if self._passes is not None:
            self._passes.put_back()
            self._passes = None

    def _step_by_passes(self, grads: Any, gradient: Callable[[], Any] | None, inputs: Mapping[str, Any]) -> None:
        if gradient is not None:
            self._check_closed("step(gradient=...)")
            try:
                while self.next_pass(grads, **inputs):
                    grads = gradient()
            except BaseException:
                self.put_back()
                raise
        passes = self._passes
        if passes is None or not passes.closed:
            raise RulecError(
                f"{self.rule.name} evaluates the model again in a step: give step() a function gradient= of the "
                f"gradients where the arrays are then, or call next_pass(grads) before it until it is False"
            )
        leaves = matching_leaves(grads, self.names, "the gradient")
        passes.check(leaves)
        turned = self._engine.copies_for(passes.table)
        kept = {key: turned.in_order(values) for key, values in passes.values.items()}
        self._fire(leaves, {**self._inputs(inputs, leaves), **kept})
        self._passes = None

    def _inputs(self, inputs: Mapping[str, Any], leaves: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for key, value in inputs.items():
            kind = self.rule.inputs.get(key, SCALAR)
            if not per_tensor(kind):
                arguments[key] = value
                continue
            arrays = matching_leaves(value, self.names, f"the input {key}", prefix)
            missing = leaves.keys() - arrays.keys()
            if missing and kind == LIKE_P:
                raise TensorError(f"the input {key!r} has nothing for {min(missing)}, which has a gradient")
            turned = self._engine.copies_for(self._hyper_table())
            arguments[key] = turned.in_order({name: arrays.get(name) for name in leaves})
        return arguments

    @synchronized
    def statistics(self) -> StepStatistics:
        """The statistics of the last step that measured them: name -> array's name -> value.

        RulecError where the optimizer was made without `watch`.
        """
        if self._engine.schedule is None:
            raise RulecError(
                f"{self.rule.name} measures no statistics: make it with watch='norms', or with expressions by name"
            )
        with self._engine.arrays.here():
            return self._engine.step_statistics()

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays that a step updates, by name."""
        return dict(self._engine.params)

    @property
    def routing(self) -> dict[str, str]:
        """The name of the rule that each array goes to."""
        return {name: self._engine.tensors[i].rule.name for name, i in self._engine.ids.items()}

    @contextmanager
    def partial(self, *, journal: bool = False, uses: Mapping[str | int, int] | None = None) -> Iterator[Optimizer]:
        """A step taken layer by layer: `with opt.partial(): opt.update(layer, grad)`. It closes at exit.

        Hyper-parameters are read when it opens. `uses` says of layers with several gradients, such as shared weights,
        how many they get: the sum updates them, with the last one or at exit. An exception after the first update
        leaves the optimizer broken off: until `accept_partial()`, or `rollback()` where `journal` keeps the old arrays,
        it raises PartialUpdate. RulecError for a rule whose update of one tensor depends on the others.
        """
        step = self._open_partial(journal, uses or {})
        try:
            yield self
            with self._lock:
                for layer in [*step.waiting]:
                    self._update(step, layer, *step.take(layer))
        except BaseException:
            # What groups and the model remember waits for rollback() or accept_partial().
            self._broken = step if step.updated and step.pending else None
            raise
        finally:
            with self._lock:
                self._open = None
                if self._broken is None:
                    self._engine.end()
                    self._engine.count_step()

    @synchronized
    def _open_partial(self, journal: bool, uses: Mapping[str | int, int]) -> PartialStep:
        self._check_closed("partial()", "close the other first")
        check_single(self.rule, "partial()")
        if self._engine.joins:
            raise RulecError(
                f"{self.rule.name} has a value of all arrays together, so no layer can be updated alone: use step()"
            )
        self._engine.statistics.check_apart("an update layer by layer")
        self._check_training()
        self._open = step = PartialStep(self.names, self._hyper_table(), journal, uses)
        self._engine.begin()
        return step

    @property
    def in_partial(self) -> bool:
        """Whether a step is open, inside `partial()`."""
        return self._open is not None

    @synchronized
    def update(self, layer: str | int, grad: Any, **inputs: Any) -> None:
        """Updates one layer inside `partial()`: what is at the key or index `layer`, by gradients of its structure.

        `inputs` gives what the rule names under `inputs`: a number, or arrays in the structure of the layer.
        """
        if self._open is None:
            raise RulecError("update() belongs inside `with opt.partial():`")
        prefix = str(layer)
        leaves = matching_leaves(grad, self.names, f"the gradient of {prefix}", _inside(prefix))
        self._open.check_new(leaves)
        self._update(self._open, prefix, self._open.gather(prefix, leaves, inputs), inputs)

    def _update(self, step: PartialStep, layer: str, leaves: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        if not leaves:
            return
        ids, turned = tuple(self._engine.ids[name] for name in leaves), self._engine.copies_for(step.table)
        grads, arguments = turned.in_order(leaves), self._inputs(inputs, leaves, _inside(layer))
        with self._engine.arrays.here(), turned.stepping(leaves):
            launches = self._engine.ready(ids, grads, step.table, arguments)
            if step.journal:
                step.old |= {name: self._copies(name) for name in leaves}
            try:
                run(launches)
            except BaseException:
                if any(launch.wrote for launch in launches):
                    step.updated |= dict.fromkeys(leaves)
                raise
        step.updated |= dict.fromkeys(leaves)

    def _copies(self, name: str) -> dict[str, Any]:
        """An array, as "", and its states, as they are now."""
        return {key: value.copy() for key, value in {"": self._engine.params[name], **self.state(name)}.items()}

    @synchronized
    def rollback(self) -> None:
        """Goes back to before the step that broke off: arrays, states and step counts are as they were.

        RulecError where no step broke off, or `partial()` had no `journal=True`.
        """
        step = self._broken_step("rollback()")
        if not step.journal:
            raise RulecError(
                "rollback() needs what was there before the step, and partial() had no journal=True: load a "
                "checkpoint, or call accept_partial()"
            )
        with self._engine.arrays.here():
            for name, copies in step.old.items():
                for key, value in {"": self._engine.params[name], **self.state(name)}.items():
                    self._engine.arrays.fill(value, copies[key])
        self._engine.begin()
        self._broken = None

    @synchronized
    def accept_partial(self) -> None:
        """Goes on from a step that broke off: updated arrays stay so, the others are left out of this step."""
        self._broken_step("accept_partial()")
        self._engine.end()
        self._broken = None

    def _broken_step(self, wanted: str) -> PartialStep:
        if self._broken is None:
            raise RulecError(f"{wanted} is for a step that broke off in the middle, and none did")
        return self._broken

    def _check_closed(self, wanted: str, remedy: str = "close it first") -> None:
        if self._broken is not None:
            raise self._broken.broken()
        if self._engine.unfinished:
            self._engine.unfinished = False
            raise interrupted(self.rule.name)
        if self._open is not None:
            raise RulecError(f"{wanted} inside partial(), which is open: {remedy}")
        if self._passes is not None and not self._passes.closed:
            raise RulecError(f"{wanted} between the passes of a step: call put_back(), or finish the step first")

    def eval(self) -> None:
        """Moves the parameters to where the rule says that they are to be evaluated; once there, does nothing.

        RuleError for a rule without `evaluate`.
        """
        self._move(to_evaluation, training=False)

    def train(self) -> None:
        """Undoes `eval()`; in training, does nothing."""
        self._move(to_training, training=True)

    @synchronized
    def _move(self, way: Callable[[RuleData], RuleData | None], training: bool) -> None:
        if self.rule.evaluate is None:
            raise RuleError(f"{self.rule.name} is evaluated where it is trained: it has no evaluate")
        self._check_closed("train()" if training else "eval()")
        if self._training is not training:
            table = self._hyper_table()
            with self._engine.arrays.here(), self._engine.copies_for(table).stepping(self.names):
                self._engine.change(way, table)
            self._training = training

    def _check_training(self) -> None:
        if not self._training:
            raise RulecError(f"the parameters are where {self.rule.name} is evaluated: call train() before a step")

    def _fire(self, leaves: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        ids = tuple(self._engine.ids[name] for name in leaves)
        table = self._hyper_table()
        turned = self._engine.copies_for(table)
        try:
            with self._engine.arrays.here(), turned.stepping(leaves):
                self._engine.step(ids, turned.in_order(leaves), table, inputs)
        except BaseException:
            self._engine.statistics.take_back()
            raise
        self._engine.count_step()

    def _hyper_table(self) -> Numbers:
        """The hyper-parameters as the engine takes them; HyperError where `hyper` is not all of them as numbers."""
        known, hyper = self._engine.hyper, self.hyper
        complete = type(hyper) is dict and hyper.keys() == known.keys()
        if not (complete and _NUMBERS.issuperset(map(type, hyper.values()))):
            hyper = checked_hyper(self.rule.name, known, hyper)
        return self._engine.hyper_table([hyper])

    def state(self, name: str) -> dict[str, Any]:
        """The states of one array by name, and its `step`: live buffers, not copies. Empty before its first update."""
        return self._engine.states(name)

    def storage(self) -> dict[str, dict[str, str]]:
        """Array -> state -> its dtype, or its format with the block, as `{"w": {"m": "int8/32"}}`.

        States that are not there before the first update are not listed. A state that a format is not safe for, and
        every state of an array of fewer than 4,096 elements, has a dtype of floats.
        """
        return {name: self._engine.storage(self._engine.ids[name]) for name in self.names}

    @synchronized
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: the rule's name, hyper-parameters, and each array's states (NumPy's copies)."""
        self._check_closed("state_dict()")
        copied, shared = self._engine.arrays.copied, self._engine.shared
        state = {n: {k: copied(v) for k, v in self.state(n).items()} for n in self.names}
        return {
            "rule": self.rule.name,
            "hyper": dict(self.hyper),
            "state": {k: v for k, v in state.items() if v},
            "shared": {k: copied(v) for k, v in shared.values.items()},
            "counts": {"group": copied(shared.group_t), "model": float(shared.model_t[0])},
            "seed": self._engine.seed,
            "training": self._training,
            "formats": self._engine.format_keys(),
        }

    @synchronized
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict()`: values are copied into new buffers, in this optimizer's own dtypes.

        An array that had not been updated when the state was saved is as before its first update. Raises StateMismatch,
        before anything is changed, where it belongs to another rule or other arrays.
        """
        self._check_closed("load_state_dict()")
        start = {key: value for key, value in self.hyper.items() if key == AT_START}
        self._engine, self.hyper = loaded(self.rule, self._engine, saved, start)
        self._training = bool(saved.get("training", True))


def _inside(layer: str) -> str:
    """The beginning of the names of what is in a layer; a single array is not in one."""
    return "" if layer == "param" else f"{layer}/"
