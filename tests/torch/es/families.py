"""The families of noise, each with the settings in which it does something of its own."""

from __future__ import annotations

from typing import Any

from rulec.es import Perturbation

FAMILIES: dict[str, dict[str, Any]] = {
    "independent": {},
    "sparse": {"sparsity": 2},
    "permuted": {},
    "permuted columns": {"sides": "columns"},
    "permuted both": {"sides": "both", "in_sparsity": 0.5, "out_sparsity": 3},
    "permuted sparse rows": {"sides": "rows", "out_sparsity": 0.5},
    "permuted without pairs": {"sides": "rows", "out_sparsity": 5, "antithetic": False},
    "permuted columns without pairs": {"sides": "columns", "antithetic": False},
    "permuted both without pairs": {"sides": "both", "antithetic": False},
    "signflip": {},
    "signflip rows": {"sides": "rows"},
    "signflip columns": {"sides": "columns"},
    "lowrank": {},
    "lowrank 3": {"rank": 3},
    "lowrank 6": {"rank": 6},
    "dropout": {},
}


def perturbation_of(name: str, **other: Any) -> Perturbation:
    """A perturbation of a family with its settings."""
    settings: dict[str, Any] = {"directions": 4, "sigma": 0.3, "seed": 5, **FAMILIES.get(name, {}), **other}
    return Perturbation(name.split()[0], **settings)  # type: ignore[arg-type]
