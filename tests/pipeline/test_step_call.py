"""Ranks of one pipeline that call different steps, or with different batches, are told."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from support.logs import logged
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.step.step import StepCall, probe_of

CONFIG = {"partitions": 2, "microbatches": 2}
CALL = StepCall("train", (True, True), ((4, 2),), 1.5)


class Drawing(nn.Module):
    """Draws Python's and NumPy's random numbers, on one stage only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.drawn: list[float] = []

    def forward(self, x):
        self.drawn.append(random.random() + float(numpy.random.random()))
        return self.second(self.first(x))


def _model() -> Any:
    torch.manual_seed(0)
    return smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


@smp.step
def train(model, x):
    loss = model(x).sum()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, x):
    return model(x)


def _differing(how: str) -> Any:
    model, first = _model(), smp.rank() == 0
    x = torch.ones(4, 2)
    try:
        with logged() as said:
            if how == "function":
                (train if first else evaluate)(model, x)
            elif how == "mode":
                model.train(first)
                train(model, x)
            elif how == "shapes":
                train(model, torch.ones(4 if first else 8, 2))
            elif how == "values":
                train(model, x * (1 + smp.rank()))
                train(model, x * (1 + smp.rank()))
            else:
                train(model, x)
    except (SMPUserError, SMPRuntimeError) as error:
        return type(error).__name__, str(error)
    return "", [line for line in said if "called the step" in line]


@pytest.mark.parametrize(
    ("how", "names", "kinds", "advice"),
    [
        ("function", ("the step train", "the step evaluate"), ["SMPUserError"] * 2, "look for an `if` on the rank"),
        ("mode", ("training", "evaluation"), ["SMPUserError", "StageError"], "branch on smp.dp_rank()"),
    ],
)
def test_another_step_is_an_error_on_all_ranks(ranks, how, names, kinds, advice):
    results = ranks(_differing, 2, how, config=CONFIG)
    assert sorted(kind for kind, _ in results) == kinds
    for _, text in results:
        assert all(name in text for name in names)
        assert advice in text


@pytest.mark.parametrize(
    ("how", "text"), [("shapes", "of other shapes"), ("values", "with other values"), ("same", None)]
)
def test_another_batch_is_warned_of_once(ranks, how, text):
    results = ranks(_differing, 2, how, config=CONFIG)
    warnings = [line for _, lines in results for line in lines]
    assert len(warnings) == (text is not None)
    assert all(text in line and "num_replicas=smp.dp_size()" in line for line in warnings)


def test_calls_are_compared():
    assert CALL.check(CALL, 1, 0) == ""
    nothing = float("nan")
    assert CALL._replace(probe=nothing).check(CALL._replace(probe=nothing), 1, 0) == ""
    assert "other values" in CALL.check(CALL._replace(probe=2.0), 1, 0)
    with pytest.raises(SMPUserError, match="rank 1 called the step train .* rank 0 .* called test"):
        CALL.check(CALL._replace(function="test"), 1, 0)


def test_the_first_tensor_is_looked_at():
    x = torch.arange(6.0)
    assert probe_of([((), {"a": [x]})]) == probe_of([x, torch.ones(3)])
    assert probe_of([x]) != probe_of([x.flip(0)])
    assert probe_of([x.bool()]) is not None
    assert probe_of(["text", None, 3]) is None
    assert probe_of([x.to(torch.complex64)]) is None
    assert probe_of([torch.empty(3, device="meta")]) is None
    assert probe_of([torch.empty(0)]) == 0.0


def _drawing(placed: int) -> Any:
    random.seed(5), numpy.random.seed(5)
    net = Drawing()
    smp.set_partition(net.first, 0), smp.set_partition(net.second, 1)
    model = smp.DistributedModel(net)
    after = []
    for _ in range(3):
        train(model, torch.ones(4, 2))
        after.append((random.random(), float(numpy.random.random())))
    return after, net.drawn


def test_generators_of_python_and_numpy_agree_after_a_step(ranks):
    config = {**CONFIG, "auto_partition": False, "default_partition": 0}
    (first, drawn), (second, nothing) = ranks(_drawing, 2, 0, config=config)
    assert first == second
    assert len(set(first)) == 3
    assert not nothing
    assert len(set(drawn)) == len(drawn) >= 6
    again, _ = ranks(_drawing, 2, 0, config=config)[0]
    assert again == first


class _Unequal(nn.Module):
    """Its root stage is the last: the head and the code between the parts are there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(torch.relu(self.body(self.embed(ids))))


def _fed(feeds: str, config: Any) -> Any:
    """Losses of some steps; ``feeds`` says what ranks get that are not the first of a pipeline."""
    smp.init(config)
    torch.manual_seed(0)
    model = smp.DistributedModel(_Unequal())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def step(model, batch, weight=1.0):
        loss = nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()) * weight
        model.backward(loss)
        return loss

    losses, draw = [], torch.Generator().manual_seed(1)
    for number in range(5):
        ids = torch.randint(0, 16, (4 if number < 4 else 8, 3), generator=draw)
        batch = {"ids": ids, "labels": ids.roll(1)}
        if smp.pp_rank() != 0 and feeds == "placeholders":
            batch = {"ids": torch.zeros(4, 3), "labels": torch.zeros(4, 3)}
        optimizer.zero_grad()
        other = feeds == "placeholders" and smp.pp_rank() != 0
        loss = step(model, batch, weight=0.0 if other else 2.0)
        losses.append(float(loss.reduce_mean()))
        optimizer.step()
    return losses, None if model.pipeline is None else model.pipeline.root_rank


def test_the_batch_of_the_first_rank_is_used_whichever_stage_runs_the_step(ranks):
    config = {"partitions": 2, "microbatches": 2}
    same = ranks(_fed, 2, "the same", config, init=False)
    placeholders = ranks(_fed, 2, "placeholders", config, init=False)
    alone = ranks(_fed, 1, "the same", {"microbatches": 2}, init=False)
    assert same[0][1] == 1, "the root stage is the first, which shows nothing"
    assert placeholders == same
    assert same[0][0] == pytest.approx(alone[0][0], rel=1e-5)


def _structures() -> Any:
    """Arguments of another structure than the first rank's, which hold a model."""
    model = _model()
    try:
        train(model, torch.ones(4, 2)) if smp.rank() == 0 else train(model=model, x=torch.ones(4, 2))
    except (SMPUserError, SMPRuntimeError) as error:
        return str(error)
    return ""


def test_what_cannot_travel_must_stand_at_its_place(ranks):
    _, error = ranks(_structures, 2, config=CONFIG, env={"SMP_TIMEOUT_SECONDS": "20"})
    assert "rank 1 called the step train with other arguments than rank 0" in error
    assert "they hold a DistributedModel" in error
