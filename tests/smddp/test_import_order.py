"""Scripts may import what belongs to the backend before PyTorch, which then finds the backend while it is half imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "container" / "smp_launch"
FOUND = [str(LAUNCH / name) for name in ("discovery", "discovery_emulation", "discovery_libraries")]
SCRIPT = """
import importlib, sys
importlib.import_module(sys.argv[1])
import torch.distributed as dist
from smp_runtime.smddp import BACKEND
assert BACKEND in dist.Backend.backend_list
"""


@pytest.mark.parametrize(
    "first",
    [
        "smdistributed.dataparallel.torch.torch_smddp",
        "smdistributed.dataparallel.torch.distributed",
        "smdistributed.dataparallel.torch.parallel.distributed",
        "smdistributed.modelparallel.torch",
        "torch",
    ],
)
def test_any_of_them_comes_first(first):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*FOUND, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, first], env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr
