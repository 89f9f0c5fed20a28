"""Settings of the pipeline, end to end: where modules go, what is traced, how much is in flight."""

from __future__ import annotations

import json

import pytest
from support.ranks.schedules import InPairs
from support.training.pipeline_training import alone, compare

BATCH = 16


def _watched(name, steps, options, policy=None):
    """Train a case and watch how many microbatches have values at once; with a policy, in that schedule."""
    import logging
    from unittest import mock

    from support.logs import logged
    from support.training.pipeline_training import staged

    import smdistributed.modelparallel.torch as smp
    import smp_runtime.pipeline.execution.module_server as server
    import smp_runtime.pipeline.execution.task_scheduler as tasks
    import smp_runtime.pipeline.execution.value_store as values
    from smp_runtime.pipeline.schedule.policies import POLICIES

    most = [0]
    original_put, original_model = values.ValueStore.put, smp.DistributedModel

    def put(self, *args, **kwargs):
        original_put(self, *args, **kwargs)
        most[0] = max(most[0], len(self._names))

    left = [0]
    original_release = server.ModuleServer.release

    def release(self, microbatch):
        left[0] += len(self.graphs.get(microbatch, {}))
        original_release(self, microbatch)

    work = []
    original_reset, original_end = tasks.TaskScheduler.reset, tasks.TaskScheduler._end_segment

    def reset(self, *args, **kwargs):
        work.clear()
        original_reset(self, *args, **kwargs)

    def end(self, task):
        work.append((task.kind.value, task.microbatch))
        original_end(self, task)

    tasks.TaskScheduler.reset, tasks.TaskScheduler._end_segment = reset, end
    server.ModuleServer.release = release
    logging.getLogger("smp").setLevel(logging.INFO)
    values.ValueStore.put = put
    smp.DistributedModel = lambda module: original_model(module, **options)
    try:
        chosen = {} if policy is None else {smp.state.cfg.pipeline: policy}
        with mock.patch.dict(POLICIES, chosen), logged(logging.INFO) as records:
            done = staged(name, steps, BATCH)
    finally:
        values.ValueStore.put = original_put
        server.ModuleServer.release = original_release
        tasks.TaskScheduler.reset, tasks.TaskScheduler._end_segment = original_reset, original_end
        smp.DistributedModel = original_model
    work = [(kind, microbatch) for kind, microbatch in work if kind != "S"]
    return {**done, "work": work, "microbatches_with_values": most[0], "graphs_left": left[0], "log": records}


# The first step runs one microbatch at a time, the second as work arrives, the last of six in the planned order.
@pytest.mark.parametrize(("schedule", "steps"), [("interleaved", 6), ("simple", 2), ("simple", 6)])
def test_never_more_than_the_active_microbatches(ranks, schedule, steps):
    settings = {
        "partitions": 2,
        "microbatches": 8,
        "active_microbatches": 2,
        "pipeline": schedule,
        "skip_tracing": True,
    }
    results = ranks(_watched, 2, "tied", steps, {}, config=settings, timeout=200)
    compare(results, alone("tied", steps=steps, batch=BATCH, microbatches=8))
    assert max(result["in_flight"] for result in results) == 2
    assert [result["microbatches_with_values"] for result in results] == [2, 2]
    assert [result["graphs_left"] for result in results] == [0, 0]  # each went with its backward pass
    assert any(result["work"] for result in results)
    for result in results if schedule == "simple" else ():
        for wave in range(4):
            kinds = [kind for kind, number in result["work"] if number // 2 == wave]
            assert kinds == sorted(kinds, reverse=True)  # F, then B


@pytest.mark.parametrize("steps", [2, 6])
def test_a_new_schedule_is_run(ranks, steps):
    """A policy that is nowhere but in its own file, before its steps are planned and afterwards."""
    settings = {"partitions": 2, "microbatches": 8, "active_microbatches": 4, "skip_tracing": True}
    results = ranks(_watched, 2, "tied", steps, {}, InPairs(), config=settings, timeout=200)
    compare(results, alone("tied", steps=steps, batch=BATCH, microbatches=8))
    assert max(result["in_flight"] for result in results) == 2
    for result in results:
        for pair in range(4):
            kinds = [kind for kind, number in result["work"] if number // 2 == pair]
            assert kinds == sorted(kinds, reverse=True)
        pairs = [number // 2 for _, number in result["work"]]
        assert pairs == sorted(pairs)


@pytest.mark.parametrize("name", ["tied", pytest.param("branching", marks=pytest.mark.full)])
def test_the_deterministic_server_runs_all_replicas_in_one_order(ranks, name):
    settings = {"partitions": 2, "microbatches": 4, "ddp": True, "deterministic_server": True}
    results = ranks(_watched, 4, name, 6, {}, config=settings, timeout=200)
    compare(results, alone(name, steps=6, batch=BATCH, microbatches=4, replicas=2))
    assert all(result["replayed"] > 0 or name == "branching" for result in results)


def test_a_traced_partition_is_logged_written_and_read_again(ranks, tmp_path):
    file = tmp_path / "partition.json"
    settings = {"partitions": 2, "microbatches": 2, "partition_file": str(file)}
    options = {"trace_execution_times": True, "trace_memory_usage": True}
    results = ranks(_watched, 2, "mlp", 4, options, config=settings, timeout=200)
    expected = alone("mlp", steps=4, batch=BATCH, microbatches=2)
    compare(results, expected)
    told = [line for line in results[0]["log"] if line.startswith("Partition assignments:")]
    assert len(told) == 1
    assert "Sequential" in told[0]
    # The other way round.
    written = json.loads(file.read_text())
    stages = written["modules"]
    assert set(stages.values()) == {0, 1}
    written["modules"] = {path: 1 - stage for path, stage in stages.items()}
    file.write_text(json.dumps(written))
    again = ranks(_watched, 2, "mlp", 4, {}, config={**settings, "load_partition": True}, timeout=200)
    compare(again, expected)
    assert [result["local"] for result in again] == [result["local"] for result in reversed(results)]


def _placed():
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    with smp.partition(index=1):
        first = nn.Linear(4, 4)
        with smp.partition(0):
            inner = nn.Sequential(nn.Linear(4, 4))
    last = nn.Linear(4, 4)
    model = smp.DistributedModel(nn.Sequential(first, inner, last))
    smp.set_partition(model.module[1][0], 1)

    @smp.step
    def train(x):
        loss = model(x).sum()
        model.backward(loss)
        return loss

    partitioned = [model.partitioned]
    hooks = []
    model.register_post_partition_hook(lambda *args: hooks.append(args))
    train(torch.ones(2, 4))
    partitioned.append(model.partitioned)
    paths = ["", "0", "1", "1.0", "2"]
    return [model.assignment.stage_of(path) for path in paths], partitioned, len(hooks)


def test_contexts_calls_and_the_default_decide(ranks):
    settings = {"partitions": 2, "auto_partition": False, "default_partition": 0}
    for stages, partitioned, hooks in ranks(_placed, 2, config=settings, timeout=120):
        assert stages == [0, 1, 0, 1, 0]
        assert partitioned == [False, True]
        assert hooks == 1
    settings["default_partition"] = 1
    for stages, _, _ in ranks(_placed, 2, config=settings, timeout=120):
        assert stages == [1, 1, 0, 1, 1]
