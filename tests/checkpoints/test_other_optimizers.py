"""A state of one kind of optimizer is refused by another before anything is loaded, by names; alike kinds go on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import CheckpointError

MADE = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "NAdam": torch.optim.NAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "FusedLAMB": lambda p: smp.optimizers.FusedLAMB(p, lr=0.1),
}
#: Who saves, who loads, and whether that goes.
PAIRS = [
    ("AdamW", "Adagrad", False),
    ("AdamW", "SGD", False),
    ("AdamW", "momentum", False),
    ("AdamW", "NAdam", False),
    ("AdamW", "Adamax", False),
    ("SGD", "AdamW", False),
    ("momentum", "AdamW", False),
    ("Adagrad", "RMSprop", False),
    ("Adagrad", "FusedLAMB", False),
    ("Adam", "AdamW", True),
    ("Adagrad", "Adagrad", True),
    ("SGD", "momentum", True),
]


def _trained(kind):
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Linear(3, 2))
    optimizer = smp.DistributedOptimizer(MADE[kind](model.parameters()))
    _update(model, optimizer)
    return model, optimizer


def _update(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("way", ["partial", "full", "state_dict"])
@pytest.mark.parametrize(("saves", "loads", "goes"), PAIRS)
def test_the_state_of_another_optimizer(solo, tmp_path, saves, loads, goes, way):
    from smp_runtime.job import session

    solo({})
    _, optimizer = _trained(saves)
    smp.save_checkpoint(tmp_path, tag="1")
    smp.save_checkpoint(tmp_path, tag="2", partial=False)
    state = optimizer.state_dict()
    session.shutdown()
    solo({})
    model, optimizer = _trained(loads)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def load():
        if way == "state_dict":
            optimizer.load_state_dict(state)
        else:
            smp.resume_from_checkpoint(tmp_path, tag={"partial": "1", "full": "2"}[way], partial=way == "partial")

    if goes:
        load()
        _update(model, optimizer)
        return
    with pytest.raises(CheckpointError) as raised:
        load()
    assert type(optimizer.optimizer).__name__ in str(raised.value)
    if way == "partial":
        assert f"the state of {MADE[saves].__name__ if isinstance(MADE[saves], type) else 'SGD'}" in str(raised.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    _update(model, optimizer)
