"""Adapters that a step function switches off, as for a reference model, are off on every stage, and only there and then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

STEPS = 3


class Adapted(nn.Module):
    """Around a linear map, as PEFT has it: switched by attributes, and frozen while they are off."""

    adapter_layer_names = ("lora_A",)

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(4, 4).requires_grad_(False)
        self.lora_A = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("first", "other")})
        self.lora_A["other"].requires_grad_(False)
        self._disable_adapters, self._active_adapter = False, ["first"]

    def switch(self, names):
        """Adapters of these names are on and trained; none means off."""
        for name, adapter in self.lora_A.items():
            adapter.requires_grad_(name in names)
        self._disable_adapters = not names
        if names:
            self._active_adapter = names

    def forward(self, x):
        out = self.base_layer(x)
        if not self._disable_adapters:
            for name in self._active_adapter:
                out = out + self.lora_A[name](x)
        return x + out.tanh()


def losses_of(reference_adapter, layers=4):
    """Train against a reference that is the same model with other adapters, or none."""
    import torch

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    net = nn.Sequential(*(Adapted() for _ in range(layers)))
    if smp.pp_size() > 1:
        for number, part in enumerate(net):
            smp.set_partition(part, int(number >= 2))
    model = smp.DistributedModel(net)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(trained, lr=0.1, momentum=0.9))

    @smp.step
    def train(x):
        result = model(x)
        with torch.no_grad():
            for part in net:
                part.switch([reference_adapter] if reference_adapter else [])
            reference = model(x)
            for part in net:
                part.switch(["first"])
        loss = (result - reference - 1).pow(2).mean() + result.pow(2).mean()
        model.backward(loss)
        return loss

    losses = []
    for number in range(STEPS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        losses.append(float(train(x).reduce_mean()))
        optimizer.step()
    gradients = {name: p.grad is not None for name, p in model.local_named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    switched = any(part._disable_adapters or part._active_adapter != ["first"] for part in net)
    return losses, state, gradients, switched


@pytest.mark.parametrize("reference", [None, pytest.param("other", marks=pytest.mark.full)], ids=["off", "others"])
def test_a_reference_inside_the_step(ranks, reference):
    (alone,) = ranks(losses_of, 1, reference, config={"ddp": True})
    config = {"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True}
    for losses, state, gradients, switched in ranks(losses_of, 2, reference, config=config):
        assert losses == pytest.approx(alone[0], abs=1e-6)
        assert not switched
        for name, has in gradients.items():
            assert has == (".lora_A.first" in name), name
        for name, value in alone[1].items():
            torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-6)
