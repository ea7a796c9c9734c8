"""GaLore's projector of pytorch_optimizer with our singular vectors."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

from rulec.compiler.matrix import MATRIX
from rulec.language.expr.node import Op


class Projector(GaLoreProjector):
    """Theirs with our singular vectors, which are float64 and have fixed signs.

    Its steps count from zero, as in the authors' code, and the rows of a square matrix are projected.
    """

    def project(self, grad: torch.Tensor, num_steps: int, *args: Any, **keywords: Any) -> torch.Tensor:
        self.projection_type = "left" if grad.shape[0] <= grad.shape[1] else "right"
        projected: torch.Tensor = super().project(grad, num_steps - 1, *args, **keywords)
        return projected

    def get_orthogonal_matrix(self, weights: torch.Tensor, projection_type: str, *_: Any, **__: Any) -> torch.Tensor:
        g = weights.numpy() if projection_type == "left" else weights.numpy().T
        vectors = torch.from_numpy(MATRIX[Op.SINGULAR_VECTORS].compute(g[None], self.rank)[0].copy())
        return vectors if projection_type == "left" else vectors.T


class StandardProjector(Projector):
    """The same, which projects the columns of a square matrix as theirs does."""

    def project(self, grad: torch.Tensor, num_steps: int, *args: Any, **keywords: Any) -> torch.Tensor:
        projected: torch.Tensor = GaLoreProjector.project(self, grad, num_steps - 1, *args, **keywords)
        return projected


class WholeProjector(Projector):
    """With all of our singular vectors."""

    def get_orthogonal_matrix(self, weights: torch.Tensor, projection_type: str, *_: Any, **__: Any) -> torch.Tensor:
        g = weights.numpy() if projection_type == "left" else weights.numpy().T
        vectors = torch.from_numpy(MATRIX[Op.SINGULAR_VECTORS].compute(g[None], min(g.shape))[0].copy())
        return vectors if projection_type == "left" else vectors.T
