"""A release of PyTorch that lacks a private name: the error comes where the name is used, and not at the import."""

from __future__ import annotations

import subprocess
import sys

import torch

from smp_runtime.errors import SMPRuntimeError


def test_what_a_release_lacks_is_named_where_it_is_used_and_nowhere_before():
    code = (
        "import torch; del torch._C._swap_tensor_impl\n"
        "vars(torch._C._autograd).pop('_top_saved_tensors_default_hooks', None)\n"
        "from smp_runtime.tensors import torch_private as door\n"
        "assert door.saved_tensor_hooks() is None\n"
        "import weakref; one = torch.ones(1); referred = weakref.ref(one)\n"
        "door.swap_contents(one, torch.ones(1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"PyTorch {torch.__version__} has no torch._C._swap_tensor_impl, by which the runtime gives" in done.stderr
    assert SMPRuntimeError.__name__ in done.stderr
