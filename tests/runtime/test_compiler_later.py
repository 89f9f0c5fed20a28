"""Optimizers run without PyTorch's compiler until it is loaded, and are PyTorch's own from then on."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.job

_WITHOUT_COMPILER = """
import sys, torch
import smp_integrations.installed

def grad_enabled_in_step(**options):
    seen = []
    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            return torch.optim.SGD.step(self, closure)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Noted([parameter], lr=0.5, **options)
    parameter.grad = torch.ones(3)
    optimizer.step(lambda: seen.append(torch.is_grad_enabled()) or 0)
    return seen, parameter.tolist()

kinds = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop]
def train():
    parameters = [torch.nn.Parameter(torch.arange(3.0)) for _ in kinds]
    optimizers = [kind([each], lr=0.1) for kind, each in zip(kinds, parameters)]
    for _ in range(2):
        for optimizer, parameter in zip(optimizers, parameters):
            optimizer.zero_grad()
            parameter.square().sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
    return [each.tolist() for each in parameters], optimizers[0], parameters[0]

without, _, _ = train()
seen = grad_enabled_in_step(), grad_enabled_in_step(differentiable=False)
assert "torch._dynamo" not in sys.modules, "an optimizer has loaded the compiler"
import torch._dynamo
with_it, optimizer, parameter = train()
assert without == with_it
assert seen == (grad_enabled_in_step(), grad_enabled_in_step(differentiable=False))
function = torch.optim.Optimizer.zero_grad.__wrapped__
assert function.__dynamo_disable is not function, "PyTorch does not know that this stays outside of compiled code"
explained = torch._dynamo.explain(lambda: optimizer.step())()
print("breaks", explained.graph_break_count)
"""


def test_an_optimizer_works_the_same_without_the_compiler_and_after_it_was_loaded():
    plain = _WITHOUT_COMPILER.replace("import smp_integrations.installed", "import torch._dynamo")
    plain = plain.replace('assert "torch._dynamo" not in sys.modules', 'assert "torch._dynamo" in sys.modules')
    # PyTorch is imported once, for both.
    code = (
        "import os, sys, torch\n"
        "for code in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        exec(code, {'__name__': '__main__'})\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code, _WITHOUT_COMPILER, plain], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours, plain_breaks = (line for line in done.stdout.splitlines() if line.startswith("breaks"))
    assert ours == plain_breaks
