"""What each module of a rank without a pipeline takes, by a clock that only its own code moves."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smp_estimator.timeline.steps import JobTimeline
from smp_records.rate_card import measured_durations
from smp_records.timeline import parse_timeline
from smp_runtime.pipeline.observe.module_recorder import ModuleRecorder
from smp_runtime.pipeline.observe.recorder import TimelineRecorder
from smp_runtime.tensors import computing_time


class Hands:
    """A clock that stands still but for what is worked."""

    now = 0.0

    def work(self, seconds):
        self.now += seconds


@pytest.fixture
def hands():
    made = Hands()
    computing_time.clocks.append(lambda: made.now)
    yield made
    computing_time.clocks.pop()


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, hands, forward, backward):
        hands.work(forward)
        ctx.hands, ctx.seconds = hands, backward
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        assert len(ctx.saved_tensors) == 1  # for which checkpointing runs the module again
        ctx.hands.work(ctx.seconds)
        return gradient, None, None, None


class Worker(nn.Module):
    """Works some time forward and backward, before and after the modules in it."""

    def __init__(self, hands, forward, backward, *inside, checkpoints=False):
        super().__init__()
        self.hands, self.times, self.checkpoints = hands, (forward / 2, backward / 2), checkpoints
        self.inside = nn.ModuleList(inside)

    def forward(self, x):
        x = Work.apply(x, self.hands, *self.times)
        for module in self.inside:
            x = checkpoint(module, x, use_reentrant=False) if self.checkpoints else module(x)
        return {"x": Work.apply(x, self.hands, *self.times)}["x"]


def recorded(hands, model, microbatches=2, backward=True):
    kept = TimelineRecorder(0, 0)
    watch = ModuleRecorder(kept, lambda: [model])
    try:
        watch.begin_step(7)
        for microbatch in range(microbatches):
            watch.turn_to(microbatch)
            x = model(torch.ones(2, requires_grad=True))
            hands.work(0.25)
            if backward:
                with watch.backward():
                    x.sum().backward()
            hands.work(0.125)
        watch.turn_to(None)
        watch.end_step()
    finally:
        watch.close()
    model(torch.ones(2))  # after the end nothing is heard
    return kept.timeline()


def durations(timeline):
    return {(one.path, one.phase): one.seconds for one in measured_durations([timeline])}


def test_each_block_is_of_the_module_whose_own_code_ran(hands):
    model = Worker(hands, 1, 2, Worker(hands, 3, 4), Worker(hands, 5, 6, Worker(hands, 7, 8)))
    timeline = recorded(hands, model)
    assert durations(timeline) == {
        ("", "forward"): 1.25,
        ("", "backward"): 2,
        ("", "step"): 0.125,
        ("inside.0", "forward"): 3,
        ("inside.0", "backward"): 4,
        ("inside.1", "forward"): 5,
        ("inside.1", "backward"): 6,
        ("inside.1.inside.0", "forward"): 7,
        ("inside.1.inside.0", "backward"): 8,
    }
    (step,) = timeline.steps
    assert step.number == 7
    # The blocks of a microbatch follow each other without a gap, forward through the modules and back.
    assert all(one[5] == two[4] for one, two in zip(step.actions, step.actions[1:], strict=False))
    assert step.stop - step.start == 2 * (16 + 20 + 0.375)
    assert {action[2] for action in step.actions} == {0, 1}


def test_what_runs_again_in_backward_is_backward_of_its_module(hands):
    model = Worker(hands, 1, 2, Worker(hands, 3, 4, Worker(hands, 5, 6)), checkpoints=True)
    found = durations(recorded(hands, model))
    assert found["", "backward"] == 2
    assert found["inside.0", "backward"] == 3 + 4
    assert found["inside.0.inside.0", "backward"] == 5 + 6
    assert found["inside.0.inside.0", "forward"] == 5


def test_a_step_without_backward_has_forward_only_to_its_end(hands):
    timeline = recorded(hands, Worker(hands, 1, 2), backward=False)
    (step,) = timeline.steps
    assert {action[1] for action in step.actions} == {"F"}
    assert sum(stop - start for *_, start, stop in step.actions) == 2 * 1.375


def test_a_backward_pass_that_the_script_begins_itself_is_seen_at_what_the_model_returned(hands):
    model = Worker(hands, 1, 2, Worker(hands, 3, 4))
    kept = TimelineRecorder(0, 0)
    watch = ModuleRecorder(kept, lambda: [model])
    watch.begin_step(0)
    watch.turn_to(0)
    model(torch.ones(2, requires_grad=True)).sum().backward()
    watch.turn_to(None)
    watch.end_step()
    watch.close()
    found = durations(kept.timeline())
    assert (found["", "backward"], found["inside.0", "backward"], found["inside.0", "forward"]) == (2, 4, 3)


def test_a_job_without_a_pipeline_leaves_the_times_of_its_modules(solo, hands, tmp_path, monkeypatch):
    monkeypatch.setenv("SMP_TIMELINE", "2")
    monkeypatch.setenv("SM_OUTPUT_DATA_DIR", str(tmp_path))
    solo({"microbatches": 2})
    model = smp.DistributedModel(Worker(hands, 1, 2, Worker(hands, 3, 4)))

    @smp.step
    def train(x, fails=False):
        output = model(x * 1.0)
        if fails:
            raise ValueError("a batch that is broken")
        loss = output.sum()
        model.backward(loss)
        hands.work(0.5)
        return loss

    x = torch.ones(4, 2, requires_grad=True)
    train(x)
    with pytest.raises(ValueError, match="broken"):
        train(x, fails=True)
    for _ in range(2):
        train(x)
    smp.shutdown()
    (path,) = tmp_path.iterdir()
    timeline = parse_timeline(path.read_bytes(), path.name)
    assert (timeline.stage, timeline.world_size, len(timeline.steps)) == (0, 1, 2)
    assert durations(timeline) == {
        ("", "forward"): 1,
        ("", "backward"): 2,
        ("", "step"): 0.5,
        ("inside.0", "forward"): 3,
        ("inside.0", "backward"): 4,
    }
    assert JobTimeline.of([(path.name, timeline)]).steps[-1].makespan == 2 * 10.5
