"""Modules that a script places: calls that do not count are told, and so are stages that get nothing."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support.logs import logged
from torch import nn

from smp_runtime.pipeline.partition.assignment import Assignment
from smp_runtime.pipeline.partition.costs import CostModel, CostSettings
from smp_runtime.pipeline.partition.manual_stages import ManualAssignment
from smp_runtime.pipeline.partition.module_tree import tree_without_tracing
from smp_runtime.pipeline.partition.partitioner import partition
from smp_runtime.pipeline.partition.report import describe
from smp_runtime.pipeline.partition.tracing import trace


def _net():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1))


def _warnings(caplog, call):
    with caplog.at_level(logging.WARNING, logger="smp"):
        call()
    return caplog.text


def test_a_module_that_is_not_in_the_model_is_named(caplog):
    manual, net = ManualAssignment(2, automatic=True), _net()
    manual.set_partition(net[0], 0)
    manual.set_partition(nn.Bilinear(2, 2, 2), 1)  # nothing holds it, and the calls do not either
    said = _warnings(caplog, lambda: manual.review(net))
    assert "no effect for a Bilinear (stage 1): no such module is in the model that was wrapped" in said
    assert "Linear (stage 0)" not in said.replace("Bilinear", "")


def test_many_are_told_in_one_warning(caplog):
    manual, net = ManualAssignment(2), _net()
    for _ in range(5):
        manual.set_partition(nn.Linear(2, 2), 1)
    assert "a Linear (stage 1), a Linear (stage 1), a Linear (stage 1) and 2 more" in _warnings(
        caplog, lambda: manual.review(net)
    )


def test_a_copy_of_a_module_is_as_good_as_the_module(caplog):
    manual, net = ManualAssignment(2), _net()
    manual.set_partition(net[1], 1)
    twin = copy.deepcopy(net)
    del net
    assert _warnings(caplog, lambda: manual.review(twin)) == ""
    assert manual.pins(twin) == {"1": 1}


def test_the_last_of_several_calls_counts_and_is_told(caplog):
    manual, net = ManualAssignment(3), _net()
    for stage in (0, 2, 1):
        manual.set_partition(net[1], stage)
    for stage in (2, 2):
        manual.set_partition(net[0], stage)
    said = _warnings(caplog, lambda: manual.review(net))
    assert "different stages for 1 (stage 0, then stage 2, then stage 1); the last call counts" in said
    assert "0 (stage 2" not in said
    assert manual.pins(net) == {"0": 2, "1": 1}


def test_set_partition_overrides_the_context_without_a_word(caplog):
    manual = ManualAssignment(2)
    with manual.partition(1):
        net = _net()
    manual.set_partition(net[0], 0)
    assert _warnings(caplog, lambda: manual.review(net)) == ""
    assert manual.resolve(net).stage_of("0") == 0


def test_calls_that_a_loaded_partition_contradicts_are_told(caplog):
    manual, net = ManualAssignment(2), _net()
    manual.set_partition(net[0], 1)
    manual.set_partition(net[2], 1)
    loaded = Assignment(2, {"": 1, "0": 0, "1": 0, "1.0": 0, "2": 1})
    said = _warnings(caplog, lambda: manual.review(net, loaded))
    assert "no effect for 0 (stage 1, but 0 in the file): load_partition is true" in said


def _placed_late(when):
    """What calls after the first step say."""
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(_net())
    if when == "wrapper":
        smp.set_partition(model, 0)

    @smp.step
    def train(x):
        loss = model(x).sum()
        model.backward(loss)
        return loss

    train(torch.ones(2, 4))
    if when == "wrapper":
        return [model.assignment.stage_of(path) for path in ("", "0", "1.0", "2")]
    stage = model.assignment.stage_of("1.0")
    smp.set_partition(model.module[1][0], stage)  # where it lies: scripts say so again after resuming
    smp.set_partition(nn.Linear(2, 2), stage)  # of no model that was partitioned
    try:
        smp.set_partition(model.module[1][0], 1 - stage)
    except ValueError as error:
        return str(error), stage
    return "", stage


def test_a_module_of_a_partitioned_model_does_not_move(ranks):
    for text, stage in ranks(_placed_late, 2, "late", config={"partitions": 2}):
        assert text.startswith(
            f"smp.set_partition put module '1.0' on stage {1 - stage}, but it lies on stage {stage} already"
        )
        assert text.endswith("call smp.set_partition between smp.DistributedModel and the first step")


def test_the_wrapper_stands_for_its_module(ranks):
    assert ranks(_placed_late, 2, "wrapper", config={"partitions": 2}) == [[0, 0, 0, 0]] * 2


def _first_step(make):
    """What is logged, and the error of the first step if there is one."""
    import smdistributed.modelparallel.torch as smp

    with logged(logging.NOTSET) as said:
        model = smp.DistributedModel(make())
        try:
            smp.step(lambda x: model(x).sum())(torch.ones(2, 4))
        except Exception as error:
            return said, f"{type(error).__name__}: {error}"
    return said, ""


def _shared():
    import smdistributed.modelparallel.torch as smp

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    smp.set_partition(net[0], 0)
    smp.set_partition(net[1], 1)
    return net


def _raises():
    class Raises(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    return Raises()


MANUAL = {"partitions": 2, "auto_partition": False, "default_partition": 1}


def test_a_manual_partition_that_leaves_a_stage_empty_is_told(ranks):
    (said, error), _ = ranks(_first_step, 2, _net, config=MANUAL)
    assert error == ""
    idle = [line for line in said if line.startswith("stage 0 has nothing to do: ")]
    assert len(idle) == 1
    assert "default_partition is 1; place some with smp.partition or smp.set_partition" in idle[0]


def test_one_stage_and_one_part_are_told_in_the_singular(caplog):
    with caplog.at_level(logging.WARNING, logger="smp"):
        partition(tree_without_tracing(nn.Linear(3, 3)), 2)
    assert "stage 0 has nothing to do: the model has 1 part that can be placed, and there are 2 stages" in caplog.text


def test_another_rank_s_message_has_no_class_of_ours(ranks):
    results = ranks(_first_step, 2, _shared, config=MANUAL)
    for (_, error), prefix in zip(results, ("", "the model could not be partitioned on rank 0: "), strict=True):
        assert error.startswith(f"SMPUserError: {prefix}module '0' on stage 0 and module '1' on stage 1 hold or use")


def _broken_first_step(in_module):
    """The errors of a first step whose script has a bug: its class, its text, and whose failure it is."""
    import smdistributed.modelparallel.torch as smp

    net = nn.Sequential(nn.Linear(4, 4), _raises() if in_module else nn.Linear(4, 4))
    model = smp.DistributedModel(net)

    def train(x):
        model(x)
        raise LookupError("the script's own")

    try:
        smp.step(train)(torch.ones(2, 4))
    except Exception as error:
        failure = getattr(error, "failure", None)
        return type(error).__name__, str(error), failure


def test_a_bug_in_the_first_step_is_told_as_in_later_ones(ranks):
    (kind, text, failure), (other, echo, told) = ranks(_broken_first_step, 2, True, config={"partitions": 2})
    assert kind == other == "StageError"
    assert text == echo
    assert "pipeline stage 0 (rank 0), module '1' in the tracing step: KeyError: 'mine'" in text
    assert "Traceback of rank 0" in text
    assert 'raise KeyError("mine")' in text
    assert "smp_runtime" not in text
    # Whichever rank is heard first, the failure is that of the rank that met it.
    assert failure == told
    assert (told.rank, told.error_type, told.message) == (0, "KeyError", "'mine'")
    assert told.traceback.startswith("In module '1' in the tracing step:\nTraceback (most recent call last)")


def test_a_bug_in_the_step_function_stays_itself_where_it_is_traced(ranks):
    (kind, text, _), (other, echo, told) = ranks(_broken_first_step, 2, False, config={"partitions": 2})
    assert (kind, text) == ("LookupError", "the script's own")
    assert other == "StageError"
    assert "pipeline stage 0 (rank 0), the step function in the tracing step: LookupError: the script's own" in echo
    assert told.rank == 0


class Scaled(nn.Module):
    """Has a parameter and much code of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x) * self.scale)
        return x


def test_the_tree_of_the_log_adds_up_and_says_what_its_costs_are():
    net = Scaled()
    found = trace(net, lambda: net(torch.ones(8, 64)).sum(), device="cpu")
    settings = CostSettings(memory_weight=0.75)
    assignment = partition(found, 2, settings)
    lines = describe(found, assignment, settings).splitlines()
    own = next(line for line in lines if line.startswith("    (own code)"))
    assert own.split()[2:] == ["Scaled", "64", own.split()[4], str(assignment.stage_of(""))]
    shares = [
        float(word[:-1]) for line in lines if line.startswith("    ") for word in line.split() if word[-1:] == "%"
    ]
    assert sum(shares) == pytest.approx(100.0, abs=0.1 * len(shares))
    assert "  cost = 0.75 × memory + 0.25 × work + traffic, which comes on top of the 100% above" in lines
    model = CostModel(found, 2, settings)
    for cost in model.stage_costs(assignment.stage_of):
        assert cost.cost == pytest.approx(0.75 * cost.memory + 0.25 * cost.work + cost.traffic)
