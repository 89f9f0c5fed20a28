"""Canaries: each checks that a private name of PyTorch is there and does what the runtime uses it for."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from smp_runtime.tensors import torch_private as door

#: What an older release that is supported lacks, and with it the runtime there: which first had it, and what is missing.
SINCE_2_6 = {
    "abort_process_groups": "a rank that ends with an error leaves its collectives to end with the process",
    **dict.fromkeys(("give_backends", "name_group", "count_collectives"), 'the backend "smddp" refuses to start'),
    **dict.fromkeys(("all_gather_single", "all_gather_single_coalesced"), 'the backend "smddp" refuses to start'),
}
RELEASE = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


class Canaries:
    """Checks by the names that they are of."""

    def __init__(self):
        self.checks = {}

    def of(self, *names):
        """Note what checks names of the door, or of ``IN_PLACE``, which begin with what has them."""

        def note(check):
            self.checks.update(dict.fromkeys(names, check))
            return check

        return note

    def run(self, name, request):
        """Fail with the release that broke the name."""
        if name in SINCE_2_6 and RELEASE < (2, 6):
            pytest.skip(f"PyTorch has it since 2.6; before, {SINCE_2_6[name]}")
        try:
            self.checks[name](request)
        except Exception as error:
            where = f"IN_PLACE ({name})" if name.startswith("torch.") else name
            pytest.fail(
                f"PyTorch {torch.__version__} broke `{where}` of smp_runtime/tensors/torch_private: "
                f"{type(error).__name__}: {error}"
            )


class Noting(door.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Doubling(nn.Module):
    def forward(self, value):
        return value * 2
