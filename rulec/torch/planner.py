"""Files of `torch.distributed.checkpoint` with codes in other shapes than this run has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rulec.compiler.layout import scale_name
from rulec.torch.states.quantized import CODES


class LoadPlanner(DefaultLoadPlanner):
    """Reads quantized states of any layout as global tensors, where the shapes in a file differ from this run's.

    Scales of shards that cut runs have a number for each element, and older files have one for each block:

        dcp.load(state, checkpoint_id=folder, planner=rulec.torch.planner.LoadPlanner())

    The optimizer's `load_state_dict` takes its shard of the global tensors. Everything else is read as torch does.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Replaces codes and scales of another shape by global tensors."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        saved = {} if metadata is None else metadata.state_dict_metadata
        for key, here in [*self.state_dict.items()]:
            if CODES not in key or not isinstance(here, Tensor):
                continue
            pair = [key, key.replace(CODES, scale_name(""))]
            if any(_differs(saved.get(name), self.state_dict.get(name)) for name in pair):
                for name in pair:
                    self._widen(name, saved.get(name))

    def _widen(self, key: str, saved: Any) -> None:
        here = self.state_dict.get(key)
        if not isinstance(saved, TensorStorageMetadata) or not isinstance(here, Tensor):
            return
        whole = torch.empty(saved.size, dtype=saved.properties.dtype, device=here.device)
        self.state_dict[key] = whole
        if key in self.mappings:
            set_element(self.original_state_dict, self.mappings[key], whole)


def _differs(saved: Any, here: Any) -> bool:
    return isinstance(saved, TensorStorageMetadata) and isinstance(here, Tensor) and saved.size != here.size()
