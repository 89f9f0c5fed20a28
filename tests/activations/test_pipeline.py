"""Checkpointing under pipeline parallelism: regions run again where they lie, and random numbers stay those of their task."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from support.logs import logged
from support.training.activation_training import HIDDEN, Layer, Net, same, train
from torch import nn

TIMEOUT = 150.0
#: Stages of six layers, and of eight; the script's own stage is 0.
STAGES = {2: [0, 0, 1, 1, 1, 0], 4: [0, 1, 1, 2, 2, 3, 3, 3]}


def _config(degree, **more):
    return {
        "pipeline_parallel_degree": degree,
        # More than two have gradients whose sum depends on the order, which the first step finds by itself.
        "microbatches": 2,
        "auto_partition": False,
        "default_partition": 0,
        "ddp": True,
        **more,
    }


def _train(*args, **more):
    return train(*args, **more)  # a function of this module brings its classes to the ranks


def _marked(strategy):
    def prepare(model):
        import smdistributed.modelparallel.torch as smp

        smp.set_activation_checkpointing(model.layers, strategy=strategy)

    return prepare


CASES = [
    (degree, strategy, before)
    for degree in STAGES
    for strategy in ("each", "contiguous", "group_2")
    for before in (0, 1)
]
SAMPLE = {(2, "each", 0), (2, "contiguous", 1), (4, "group_2", 0)}


@pytest.mark.parametrize(
    ("degree", "strategy", "before"),
    [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.full) for case in CASES],
)
def test_gradients_are_bitwise_those_without(ranks, degree, strategy, before):
    make, config = functools.partial(Net, STAGES[degree]), _config(degree)
    plain = ranks(_train, degree, make, config=config, timeout=TIMEOUT)
    marked = ranks(_train, degree, make, _marked(strategy), 3, 4, bool(before), config=config, timeout=TIMEOUT)
    same(marked, plain)
    for with_regions, without in zip(marked, plain, strict=True):
        assert with_regions["runs"] == 2 * without["runs"]


@pytest.mark.parametrize("pipeline", ["simple", pytest.param("interleaved", marks=pytest.mark.full)])
def test_the_automatic_partition(ranks, pipeline):
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "pipeline": pipeline}
    plain = ranks(_train, 2, functools.partial(Net, 6), config=config, timeout=TIMEOUT)
    same(ranks(_train, 2, functools.partial(Net, 6), _marked("group_2"), config=config, timeout=TIMEOUT), plain)


class InTheForward(Net):
    """Asks for regions itself, also for modules of the other stage, and hides what one of them needs."""

    def forward(self, ids):
        from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential

        x = checkpoint_sequential(self.layers[:3], self.embedding(ids), strategy="contiguous")
        y = checkpoint(self.layers[3], x)  # on the other stage: a handle
        # Opened inside the region only, where the task waits for it.
        z = checkpoint(_opened, self.layers[5], Hidden(y))
        return self.head(checkpoint(self.layers[4], z))


class Plain(Net):
    """The same without regions."""

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers[:3]:
            x = layer(x)
        z = _opened(self.layers[5], Hidden(self.layers[3](x)))
        return self.head(self.layers[4](z))


class Hidden:
    """Something that nobody looks into."""

    def __init__(self, value):
        self.value = value


def _opened(layer, hidden):
    noise = torch.rand(HIDDEN)
    return layer(hidden.value * noise) * torch.rand(HIDDEN)


def test_regions_of_a_forward_and_a_task_that_waits_inside_one(ranks):
    config = _config(2)
    plain = ranks(_train, 2, functools.partial(Plain, STAGES[2]), config=config, timeout=TIMEOUT)
    inside = ranks(_train, 2, functools.partial(InTheForward, STAGES[2]), config=config, timeout=TIMEOUT)
    same(inside, plain)
    assert all(a["runs"] > b["runs"] for a, b in zip(inside, plain, strict=True))


def _split(manual):
    import smdistributed.modelparallel.torch as smp

    def prepare(model):
        if not manual:
            for index, layer in enumerate(model.layers):
                smp.set_partition(layer, index)
            smp.set_partition(model.layers[1].narrow, 0)
        smp.set_activation_checkpointing(model.layers)

    try:
        with logged(logging.NOTSET) as messages:
            result = train(functools.partial(Net, [0, 1], 0) if manual else functools.partial(Net, 2), prepare)
    except smp.exceptions.SMPUserError as error:
        return str(error)
    return result["runs"], [message for message in messages if "checkpointed" in message]


def test_a_region_that_the_automatic_partition_splits_runs_plainly(ranks):
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    (first, told), (second, more) = ranks(_split, 2, False, config=config, timeout=TIMEOUT)
    told += more
    assert len(told) == 1
    assert "'layers.1' is to be checkpointed, but its modules lie on the stages 0, 1" in told[0]
    # Three steps of two microbatches; twice where it is checkpointed.
    assert (first, second) == (12, 6)


def test_a_region_that_the_script_splits_is_an_error(ranks):
    for message in ranks(_split, 2, True, config=_config(2), timeout=TIMEOUT):
        assert "'layers.1' is to be checkpointed, but its modules lie on the stages 0, 1" in message
        assert "set all of it to one stage" in message


class CallsElsewhere(Net):
    """A region with a call of another stage's module in it: by PyTorch's function, or hidden in a function."""

    how = "torch"

    def forward(self, ids):
        from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint

        x = self.embedding(ids)
        if self.how == "torch":
            x = torch.utils.checkpoint.checkpoint(
                lambda t: self.layers[1](self.layers[0](t)).sin(), x, use_reentrant=False
            )
        else:
            x = checkpoint(lambda t: self.layers[1](self.layers[0](t)), x)
        return self.head(x)


class HiddenCall(CallsElsewhere):
    how = "ours"


def _refused(make):
    import smdistributed.modelparallel.torch as smp

    try:
        train(make)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        smp.shutdown()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (CallsElsewhere, "was called again on stage 0 in backward, by a checkpointed region around it"),
        (HiddenCall, "calls modules of other pipeline stages, and running it again in backward would call them again"),
    ],
)
def test_calls_of_other_stages_in_a_region_are_refused(ranks, kind, message):
    for error in ranks(_refused, 2, functools.partial(kind, [0, 1]), config=_config(2), timeout=TIMEOUT):
        assert message in error


@pytest.mark.parametrize("strategy", ["each", pytest.param("group_2", marks=pytest.mark.full)])
def test_offloading_follows_the_planned_order(ranks, strategy):
    make, config = functools.partial(Net, STAGES[2]), _config(2)
    plain = ranks(_train, 2, make, None, 6, config=config, timeout=TIMEOUT)
    peaks, unit = [], 2 * 5 * HIDDEN * 4
    for horizon in (1, 3, 6):
        offloading = {**config, "offload_activations": True, "activation_loading_horizon": horizon}
        found = ranks(_train, 2, make, _marked(strategy), 6, config=offloading, timeout=TIMEOUT)
        same(found, plain)
        for rank in found:
            followed = [f for f, is_followed in zip(rank["figures"], rank["followed"], strict=True) if is_followed]
            assert followed, rank["followed"]
            assert all(figures["late"] == 0 for figures in followed)
            assert all(figures["resident"] == 0 for figures in rank["figures"])
            for figures, tape, is_followed in zip(rank["figures"], rank["tapes"], rank["followed"], strict=True):
                if is_followed:
                    assert figures["peak"] == _predicted(tape, horizon) * unit
        peaks.append([rank["figures"][-1]["peak"] // unit for rank in found])
        assert all(peak <= horizon + 1 for peak in peaks[-1])
    assert all(few <= many for few, many in zip(peaks[0], peaks[-1], strict=True))
    if strategy == "each":
        assert all(few < many for few, many in zip(peaks[0], peaks[-1], strict=True))


def _said(make, strategy):
    with logged() as messages:
        train(make, _marked(strategy), 3)
    return [message for message in messages if "saves nothing" in message]


@pytest.mark.parametrize(("strategy", "said"), [("each", 1), ("contiguous", 0)])
def test_offloading_that_saves_nothing_is_said_once_on_that_stage(ranks, strategy, said):
    config = _config(2, offload_activations=True)
    root, other = ranks(_said, 2, functools.partial(Net, STAGES[2]), strategy, config=config, timeout=TIMEOUT)
    assert (len(root), len(other)) == (0, said)
    assert all(
        "on pipeline stage 1: in each microbatch other stages call 3 checkpointed regions" in text for text in other
    )


def _predicted(tape, horizon):
    """Most activations on the device: those of the running task, and those whose backward is within the horizon."""
    forward = {entry.key: index for index, entry in enumerate(tape) if entry.kind == "F"}
    backward = {entry.key: index for index, entry in enumerate(tape) if entry.kind == "B"}
    return max(
        sum(now == forward[key] or (forward[key] <= now <= backward[key] <= now + horizon) for key in forward)
        for now in range(len(tape))
    )


class Wrapped(nn.Module):
    """Calls its layers through a function of its own, as older models of Transformers do."""

    gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self._gradient_checkpointing_func = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        self.enabled = True

    def forward(self, x):
        for layer in self.layers:
            x = self._gradient_checkpointing_func(layer.__call__, x) if self.enabled else layer(x)
        return x


class OlderNet(Net):
    def __init__(self, enabled) -> None:
        super().__init__([])
        import smdistributed.modelparallel.torch as smp

        self.layers = Wrapped()
        self.layers.enabled = enabled
        smp.set_partition(self.layers.layers[1], 1)


def test_a_model_that_wraps_the_calls_of_its_layers(ranks):
    plain, wrapped = (
        ranks(_train, 2, functools.partial(OlderNet, enabled), config=_config(2), timeout=TIMEOUT)
        for enabled in (False, True)
    )
    same(wrapped, plain)
    assert all(a["runs"] > b["runs"] for a, b in zip(wrapped, plain, strict=True))
