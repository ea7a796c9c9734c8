"""Faults of one line for `make faults`: what a mistake in a change could be, in every part of the project.

The tests of the folders that are named run first; where these pass, all others run. On 28 November 2026 each fault was
tried by the nearest files alone (FAULT_NEAR=1): those of `make test` found 44 of 63, and those of `.ci/run` the others.

| area | faults | found by `make test` | found by `.ci/run` |
|---|---|---|---|
| language, compiler, analysis | 18 | 17 | 18 |
| storage | 7 | 5 | 7 |
| checkpoints | 5 | 4 | 5 |
| backends cpu, c, triton, jax, numpy, cupy, mlx | 16 | 5 | 16 |
| adapters of torch, JAX, MLX and arrays | 11 | 8 | 11 |
| shards | 6 | 5 | 6 |
| all | 63 | 44 | 63 |
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A text of a file, the text in its place, and the folders of tests that are nearest."""

    area: str
    file: str
    old: str
    new: str
    near: str


FAULTS = (
    Fault(
        "language",
        "rulec/language/hyper.py",
        "inside &= number < self.below or",
        "inside &= number <= self.below or",
        "language/test_ranges.py language/test_mistakes.py",
    ),
    Fault(
        "language",
        "rulec/language/hyper.py",
        "return now / start if start > 0 else 1.0",
        "return start / now if start > 0 else 1.0",
        "rules/test_rates.py torch/test_second_rates.py",
    ),
    Fault(
        "language",
        "rulec/language/compose/combine.py",
        "min=max(a.min, b.min), max=min(a.max, b.max)",
        "min=min(a.min, b.min), max=min(a.max, b.max)",
        "language/test_compose.py",
    ),
    Fault(
        "language",
        "rulec/language/compose/combine.py",
        "        draws += count_draws(rule)\n",
        "        draws = count_draws(rule)\n",
        "compiler/test_random.py language/test_compose.py",
    ),
    Fault(
        "language",
        "rulec/language/compose/wrap.py",
        "            draws += combine.count_draws(rule)\n",
        "            draws += 0\n",
        "compiler/test_random.py language/test_wrap.py",
    ),
    Fault(
        "language",
        "rulec/language/parse/expression.py",
        "return _joined(Op.AND, parts)",
        "return _joined(Op.OR, parts)",
        "language/test_syntax.py language/test_text.py language/test_python.py",
    ),
    Fault(
        "compiler",
        "rulec/compiler/simplify.py",
        "3.0: lambda x: _times(_times(x, x), x),",
        "3.0: lambda x: _times(x, x),",
        "compiler/test_passes.py compiler/test_semantics.py",
    ),
    Fault(
        "compiler",
        "rulec/compiler/simplify.py",
        "turned = _n(Op.ADD, quarters, 1) if is_cosine",
        "turned = _n(Op.SUB, quarters, 1) if is_cosine",
        "compiler/test_trigonometry.py",
    ),
    Fault(
        "compiler",
        "rulec/compiler/stages.py",
        "last += 1  # a reduction over all tensors comes before the stage that some of them skip",
        "pass",
        "compiler/test_stages.py runtime/test_stages.py",
    ),
    Fault(
        "compiler",
        "rulec/compiler/memory.py",
        "source = ring[(place - turns) % len(ring)]",
        "source = ring[(place + turns) % len(ring)]",
        "runtime/test_rings.py",
    ),
    Fault(
        "compiler",
        "rulec/compiler/interpreter.py",
        "if not self._owners(letters, key) <= skipped:\n                self._write",
        "if not {key} <= skipped:\n                self._write",
        "compiler/test_reference.py compiler/test_semantics.py runtime/test_stages.py",
    ),
    Fault(
        "compiler",
        "rulec/compiler/scalars.py",
        "return t if part.arg is None else levels.get(str(part.arg), t)",
        "return t",
        "compiler/test_stages.py runtime/test_stages.py runtime/test_engine.py",
    ),
    Fault(
        "compiler",
        "rulec/compiler/weights.py",
        "const(0x8080) if kind",
        "const(0x8000) if kind",
        "backends/test_weights.py torch/test_weights.py",
    ),
    Fault(
        "analysis",
        "rulec/analysis/zero.py",
        '<= {"0", "f", "1"}',
        '<= {"0", "f", "1", "+"}',
        "analysis/test_answers.py analysis/test_claims.py",
    ),
    Fault(
        "analysis",
        "rulec/analysis/fold.py",
        "bool(known.arg) == decides else other",
        "bool(known.arg) != decides else other",
        "analysis",
    ),
    Fault(
        "analysis",
        "rulec/analysis/linear.py",
        "size / (4 if key in halves else 2)",
        "size / 2",
        "analysis/test_storage.py",
    ),
    Fault(
        "analysis",
        "rulec/analysis/storage.py",
        "refused = LINEAR if floor and not unsigned else ()",
        "refused = LINEAR if floor and unsigned else ()",
        "analysis/test_storage.py golden/test_storage.py",
    ),
    Fault(
        "analysis",
        "rulec/analysis/zero.py",
        "*dict.fromkeys((*assumed, *fold.conditions))",
        "*dict.fromkeys(assumed)",
        "analysis/test_answers.py analysis/test_claims.py",
    ),
    Fault(
        "storage",
        "rulec/formats/blocks.py",
        "np.where((x > 0) & (code == zero(format)), code + 1, code)",
        "np.where((x >= 0) & (code == zero(format)), code + 1, code)",
        "formats/test_blocks.py formats/test_definition.py",
    ),
    Fault(
        "storage",
        "rulec/formats/blocks.py",
        "np.where(negative >= positive, negative / reach(format), positive)",
        "np.where(negative > positive, negative / reach(format), positive)",
        "formats/test_blocks.py formats/test_definition.py formats/test_peers.py",
    ),
    Fault(
        "storage",
        "rulec/formats/tables.py",
        "half = np.uint32((1 << (drop - 1)) - 1) + ((magnitude >> np.uint32(drop)) & np.uint32(1))",
        "half = np.uint32(1 << (drop - 1))",
        "formats/test_tables.py formats/test_blocks.py formats/test_peers.py",
    ),
    Fault(
        "storage",
        "rulec/runtime/storage/allocator.py",
        "offset = math.ceil(end / ALIGNMENT) * ALIGNMENT",
        "offset = end",
        "runtime/test_engine.py runtime/test_flat.py runtime/test_shared.py runtime/test_estimate.py",
    ),
    Fault(
        "storage",
        "rulec/runtime/storage/allocator.py",
        "if before.get(name) == after.get(name):",
        "if name in before and name in after:",
        "runtime/test_coded.py array/test_optimizer.py torch/test_small_states.py",
    ),
    Fault(
        "storage",
        "rulec/runtime/storage/quantized.py",
        "for name in coded.keys() & self._stored[stage]:",
        "for name in coded.keys() & self._used[stage] - self._stored[stage]:",
        "runtime/test_coded.py runtime/test_coded_between.py",
    ),
    Fault(
        "storage",
        "rulec/torch/states/quantized.py",
        "return 1, [_flat(saved_part(",
        "return unit, [_flat(saved_part(",
        "torch/test_small_states.py torch/test_shards.py torch/test_sections.py",
    ),
    Fault(
        "checkpoints",
        "rulec/checkpoint/loading.py",
        "v.turned(order) if v.shape == saved.shape else v",
        "v.turned(order) if v.shape != saved.shape else v",
        "checkpoint/test_run.py checkpoint/test_between_frameworks.py checkpoint/test_jax.py",
    ),
    Fault(
        "checkpoints",
        "rulec/checkpoint/content.py",
        '"group": p.group, **_formats(p)',
        '"group": 0, **_formats(p)',
        "checkpoint/test_run.py checkpoint/test_file.py checkpoint/test_torch.py",
    ),
    Fault(
        "checkpoints",
        "rulec/checkpoint/loading.py",
        "    if checkpoint.seed != seed:\n",
        "    if checkpoint.seed and checkpoint.seed != seed:\n",
        "checkpoint/test_run.py checkpoint/test_torch.py checkpoint/test_jax.py",
    ),
    Fault(
        "checkpoints",
        "rulec/torch/checkpoint.py",
        'buffers["step"].fill_(saved.steps)',
        'buffers["step"].fill_(0)',
        "checkpoint/test_torch.py checkpoint/test_between_frameworks.py",
    ),
    Fault(
        "checkpoints",
        "rulec/array/checkpoint.py",
        "steps = [*loaded.group_steps, *loaded.model_steps, 0]",
        "steps = [0]",
        "checkpoint/test_arrays.py checkpoint/test_between_frameworks.py",
    ),
    Fault(
        "cpu",
        "backends/cpu/print.py",
        '"i = stop - start - 1"',
        '"i = stop - start - 2"',
        "backends/test_cpu.py backends/test_cpu_storage.py",
    ),
    Fault(
        "cpu",
        "backends/cpu/print.py",
        "each[at : at + MOST_REDUCED]",
        "each[at : at + MOST_REDUCED - 1]",
        "backends/test_cpu_stages.py backends/test_cpu.py",
    ),
    Fault(
        "cpu",
        "backends/cpu/words.py",
        "builder.select(*values)",
        "builder.select(values[0], values[2], values[1])",
        "backends/test_cpu.py backends/test_cpu_math.py",
    ),
    Fault(
        "c",
        "backends/cstyle/words.py",
        "return a != a ? a : less;",
        "return less;",
        "backends/test_c_words.py backends/test_c.py",
    ),
    Fault(
        "c",
        "backends/cstyle/words.py",
        "(rest < 0) != (b < 0) ? rest + b : rest;",
        "rest;",
        "backends/test_c_words.py backends/test_c.py",
    ),
    Fault(
        "c",
        "backends/cstyle/words.py",
        "(low < (uint32_t)origin ? first + silver : first)",
        "first",
        "backends/test_chance.py backends/test_noise_streams.py backends/test_c_words.py backends/test_c.py",
    ),
    Fault(
        "triton",
        "backends/triton/words.py",
        'float("nan"), least)',
        "least, least)",
        "backends/test_triton_functions.py backends/test_triton.py",
    ),
    Fault(
        "triton",
        "backends/triton/words.py",
        "rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16",
        "rounded = (bits + 0x8000) >> 16",
        "backends/test_triton_narrow.py backends/test_triton.py",
    ),
    Fault(
        "triton",
        "backends/triton/words.py",
        "inside = done * one * LANES + lane < limit",
        "inside = lane < limit",
        "backends/test_triton_functions.py backends/test_triton.py",
    ),
    Fault(
        "jax",
        "backends/jax/print.py",
        'return f"rounded({text})" if value in self._held and not is_name else text',
        "return text",
        "backends/test_jax.py jax/test_sums.py golden/test_sources.py",
    ),
    Fault(
        "jax",
        "backends/jax/print.py",
        'Op.MAX: "-jnp.inf"',
        'Op.MAX: "0.0"',
        "backends/test_jax.py golden/test_sources.py",
    ),
    Fault(
        "numpy",
        "backends/numpy/print.py",
        "return [str(s.value.arg) for s in stores if",
        "return [] and [s for s in stores if",
        "backends/test_numpy.py golden/test_sources.py",
    ),
    Fault(
        "numpy",
        "backends/numpy/words.py",
        "kept = () if axis is None else",
        "kept = () if True else",
        "backends/test_numpy.py",
    ),
    Fault(
        "cupy",
        "backends/cupy/words.py",
        "for (int step = lanes / 2; step > 0; step /= 2)",
        "for (int step = lanes / 2; step > 1; step /= 2)",
        "backends/test_cupy.py golden/test_sources.py",
    ),
    Fault(
        "cupy",
        "backends/cupy/words.py",
        "source[term * result.stride + i]",
        "source[term * result.count + i]",
        "backends/test_cupy.py",
    ),
    Fault(
        "mlx",
        "backends/mlx/words.py",
        "return mx.where((x > 0) | (x < 0), mx.sign(x), x)",
        "return mx.sign(x)",
        "backends/test_mlx.py mlx/test_language.py",
    ),
    Fault(
        "torch",
        "rulec/torch/states/interop/layouts.py",
        '("momentum", "dampening")',
        '("dampening", "momentum")',
        "torch/test_bitsandbytes.py torch/test_exchange.py",
    ),
    Fault(
        "torch",
        "rulec/torch/tensors/matrix.py",
        "tall = y.shape[0] > y.shape[1]",
        "tall = y.shape[0] < y.shape[1]",
        "torch/test_muon.py torch/test_products.py",
    ),
    Fault(
        "torch",
        "rulec/torch/step/evaluations.py",
        "if machine.group_rules[route.group].maximize}",
        "if not machine.group_rules[route.group].maximize}",
        "torch/test_passes.py torch/test_moved_passes.py torch/test_negated.py",
    ),
    Fault(
        "torch",
        "rulec/torch/groups/values.py",
        "return argument[position] if position < len(argument) else None",
        "return argument[0] if position < len(argument) else None",
        "torch/test_groups.py torch/test_fused.py torch/test_resident.py torch/test_agreement.py",
    ),
    Fault(
        "jax adapter",
        "rulec/jax/packing.py",
        "numbers = np.array(flat)  #",
        "numbers = np.asarray(flat)  #",
        "jax/test_held_packed.py jax/test_step.py",
    ),
    Fault(
        "jax adapter",
        "rulec/jax/leaves.py",
        "weak = isinstance(array, jax.Array) and array.weak_type",
        "weak = False",
        "jax/test_step.py jax/test_bad_input.py jax/test_transform.py jax/test_untrained.py",
    ),
    Fault(
        "jax adapter",
        "rulec/runtime/roles.py",
        'if "bias" in leaf or (leaf == "b" and (*modules, "w") in known):',
        'if "bias" in leaf or leaf == "b":',
        "jax/test_tags.py",
    ),
    Fault(
        "mlx adapter",
        "rulec/mlx/optimizer.py",
        "mx.array(scheduler(self.step))",
        "mx.array(scheduler(self.step + 1))",
        "mlx/test_optimizers.py mlx/test_resumed.py mlx/test_suite.py",
    ),
    Fault(
        "mlx adapter",
        "rulec/mlx/trees.py",
        "or parameter.dtype == mx.bool_)",
        ")",
        "mlx",
    ),
    Fault(
        "mlx adapter",
        "rulec/mlx/optimizer.py",
        'self.state["step"] = values.count',
        "pass",
        "mlx/test_checkpoint.py",
    ),
    Fault(
        "mlx adapter",
        "rulec/mlx/forms.py",
        "dim(-2)/dim(-1)",
        "rows/cols",
        "mlx/test_optimizers.py",
    ),
    Fault(
        "mlx adapter",
        "rulec/mlx/trees.py",
        "return gradient is not None and",
        "return",
        "mlx/test_resumed.py",
    ),
    Fault(
        "array adapter",
        "rulec/array/optimizer.py",
        'self._training = bool(saved.get("training", True))',
        "self._training = True",
        "array/test_evaluation.py array/test_optimizer.py",
    ),
    Fault(
        "array adapter",
        "rulec/array/optimizer.py",
        "step.old |= {name: self._copies(name) for name in leaves}",
        "step.old = {name: self._copies(name) for name in leaves}",
        "array/test_partial.py",
    ),
    Fault(
        "shards",
        "rulec/runtime/distributed/all_to_all.py",
        "return [(side * k // count, side * (k + 1) // count)",
        "return [(side // count * k, side // count * (k + 1))",
        "runtime/test_owners.py torch/test_exchange.py",
    ),
    Fault(
        "shards",
        "rulec/runtime/distributed/all_to_all.py",
        "self._nothing(dtypes), (sum(shares),))",
        "self._nothing(dtypes), (0,))",
        "torch/test_failures.py runtime/test_owners.py",
    ),
    Fault(
        "shards",
        "rulec/torch/distributed/consensus.py",
        "if changed not in (0, there):",
        "if changed == -1:",
        "torch/test_failures.py torch/test_processes.py torch/test_meshes.py",
    ),
    Fault(
        "shards",
        "rulec/torch/distributed/consensus.py",
        "first = self._of_all(Op.MIN, np.array([mine]))[0]",
        "first = self._of_all(Op.MAX, np.array([mine]))[0]",
        "torch/test_failures.py",
    ),
    Fault(
        "shards",
        "rulec/torch/distributed/mesh.py",
        "replicated = [axis for axis in _long_axes(mesh) if param.placements[axis].is_replicate()]",
        "replicated: list[int] = []",
        "torch/test_meshes.py torch/test_processes.py torch/test_failures.py",
    ),
    Fault(
        "shards",
        "rulec/runtime/distributed/shards.py",
        'letter = "i" if self.whole.rows > self.whole.cols else "j"',
        'letter = "i" if self.whole.rows < self.whole.cols else "j"',
        "torch/test_exchange.py torch/test_meshes.py",
    ),
)
