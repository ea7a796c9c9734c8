"""The parts of the pages that are made from the code, by the names that the pages mark them with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.docs import (
    es_tables,
    faults_table,
    gpu_table,
    house_tables,
    mesh_table,
    names_table,
    offload_table,
    race_table,
    suites_table,
    tested_table,
    training_table,
    version_tables,
    watch_table,
)
from tests.docs.commands_table import command_options
from tests.docs.defaults import differences
from tests.docs.figures import benchmarks
from tests.docs.language_tables import commands, functions, well_known_ranges
from tests.docs.optax_table import optax_functions, optax_names
from tests.docs.rule_tables import comparison, rule_files, rules, torch_classes

MAKERS: Mapping[str, Callable[[], str]] = {
    "functions": functions,
    "well-known-ranges": well_known_ranges,
    "commands": commands,
    "command-options": command_options,
    "rules": rules,
    "rule-files": rule_files,
    "comparison": comparison,
    "defaults": differences,
    "torch-classes": torch_classes,
    "optax-functions": optax_functions,
    "optax-names": optax_names,
    "benchmarks": benchmarks,
    **es_tables.MAKERS,
    **faults_table.MAKERS,
    **gpu_table.MAKERS,
    **house_tables.MAKERS,
    **mesh_table.MAKERS,
    **names_table.MAKERS,
    **offload_table.MAKERS,
    **race_table.MAKERS,
    **suites_table.MAKERS,
    **tested_table.MAKERS,
    **training_table.MAKERS,
    **version_tables.MAKERS,
    **watch_table.MAKERS,
}
