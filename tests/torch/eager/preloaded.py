"""What the processes of tests import, and all rules: forks of a process that has it begin in a tenth of a second."""

from __future__ import annotations

import numba  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.testing._internal.distributed.fake_pg  # noqa: F401

import rulec
import rulec.torch.eager
import rulec_backends.c
import rulec_backends.cpu  # noqa: F401

rulec.rules(wrappers=False)
