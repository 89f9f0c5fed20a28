"""The state of a training in shared memory: complete or absent, loaded after a restart in place, and bit for bit what it was."""

from __future__ import annotations

import gc
import os
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from support.platform.memory_told import told
from support.training.checkpoint_training import TOPOLOGIES

import smdistributed.modelparallel.torch as smp
from smp_estimator.planning import plan
from smp_runtime.checkpoint.memory.copying import Interval, Rooms
from smp_runtime.checkpoint.memory.host_folder import (
    CopyProgress,
    Data,
    Generation,
    deserialize,
    generations_of,
    head_path,
    remove_older,
    serialize,
    slots_of,
    stand_in,
    with_tensors,
)

#: Topologies and precisions.
NAMES = [
    "one",
    "dp2",
    "o2",
    "pp2",
    "tp2",
    "s2",
    "s4",
    "pp2-o2",
    "pp2-tp2",
    "tp2-o2",
    "tp2-s2",
    "pp2-s2",
    "pp4",
    "cp2",
    "cp2-s4",
]
HALF = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
#: The first window of a job has its gradients in other buckets than later ones, or adds microbatches in another order: where sums
#: have more than two terms, their last bits may differ. What is loaded does not.
LAST_BITS = {"tp2-s2", "tp2-o2", "pp2-s2"}
SAMPLE = {("cp2", "fp32"), ("dp2", "bf16"), ("s2", "fp16"), ("pp2", "fp32")}
CELLS = [(name, half) for name in NAMES for half in HALF]


@pytest.fixture
def folder():
    """A job's folder in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield path


def train_and_keep(first, last, kind="AdamW"):
    """A job that keeps its state after each step, then goes on undisturbed; losses and the state at the end."""
    from support.training.checkpoint_training import OPTIMIZERS, Training, held

    run = Training(optimizer=OPTIMIZERS[kind])
    losses = []
    for step in range(first):
        losses += run.train(step, step + 1)
        content = {"step": step + 1, "scheduler": run.scheduler.state_dict()}
        assert run.smp.memory_checkpoint(run.model, run.optimizer, content)
    kept = held(run)
    return losses + run.train(first, last), kept, held(run), torch.rand(3)


def go_on(path, last, tag=None, kind="AdamW"):
    """The job after a restart: what it found, losses and the state at the end."""
    from support.training.checkpoint_training import OPTIMIZERS, Training, held

    run = Training(seed=9, optimizer=OPTIMIZERS[kind])
    found = run.smp.newest_memory_checkpoint()
    step = run.resume(path, tag)
    loaded = held(run) if run.model.partitioned else None
    again = run.smp.newest_memory_checkpoint()
    losses = run.train(step, last)
    return (found, step, again), losses, loaded, held(run), torch.rand(3)


@pytest.mark.parametrize(
    ("name", "half"),
    [pytest.param(*cell, marks=() if cell in SAMPLE else pytest.mark.full) for cell in CELLS],
)
def test_training_goes_on_bit_for_bit(ranks, folder, name, half):
    world, config = TOPOLOGIES[name]
    config = {**config, **HALF[half]}
    before = ranks(train_and_keep, world, 3, 5, config=config, env=told(folder))
    after = ranks(go_on, world, f"{folder}/no-files", 5, config=config, env=told(folder, 1))
    for (losses, kept, state, drawn), (said, rest, loaded, again, drawn_again) in zip(before, after, strict=True):
        assert said == (3, 3, None)
        assert rest == losses[3:]
        assert torch.equal(drawn, drawn_again)
        assert len(state) > 3
        if loaded is not None:  # a pipeline that is not partitioned yet loads in its first step
            assert all(torch.equal(a, b) for a, b in zip(kept, loaded, strict=True))
        near = {"rtol": 1e-5, "atol": 1e-7} if half == "fp32" else {"rtol": 1e-2, "atol": 1e-4}
        for mine, other in zip(state, again, strict=True):
            assert torch.allclose(mine, other, **near) if name in LAST_BITS else torch.equal(mine, other)


@pytest.mark.parametrize("name", ["s2", *(pytest.param(n, marks=pytest.mark.full) for n in ("o2", "tp2", "pp2-s2"))])
def test_momentum_of_matrices_goes_on_bit_for_bit(ranks, folder, name):
    world, config = TOPOLOGIES[name]
    before = ranks(train_and_keep, world, 3, 5, "Muon", config=config, env=told(folder))
    after = ranks(go_on, world, f"{folder}/no-files", 5, None, "Muon", config=config, env=told(folder, 1))
    for (losses, kept, state, _), (said, rest, loaded, again, _) in zip(before, after, strict=True):
        assert said == (3, 3, None)
        assert rest == losses[3:]
        if loaded is not None:
            assert all(torch.equal(a, b) for a, b in zip(kept, loaded, strict=True))
        for mine, other in zip(state, again, strict=True):
            assert torch.allclose(mine, other, rtol=1e-3, atol=1e-4) if name in LAST_BITS else torch.equal(mine, other)


def test_a_later_file_is_preferred_and_an_older_one_is_not(ranks, folder, tmp_path):
    def keep_and_save(path, saves):
        from support.training.checkpoint_training import Training

        run = Training()
        for step in range(4):
            if step == saves:
                run.save(path, str(step), step)
            run.train(step, step + 1)
            if step < 2:  # two generations, after steps 1 and 2
                content = {"step": step + 1, "scheduler": run.scheduler.state_dict()}
                run.smp.memory_checkpoint(run.model, run.optimizer, content)

    def resume(path, tag):
        from support.training.checkpoint_training import Training

        run = Training(seed=9)
        return run.resume(path, tag), run.smp.newest_memory_checkpoint()

    path = str(tmp_path / "later")
    ranks(keep_and_save, 2, path, 3, config={"ddp": True}, env=told(folder))
    for tag in (None, "3"):
        assert ranks(resume, 2, path, tag, config={"ddp": True}, env=told(folder, 1)) == [(3, None)] * 2
    older = str(tmp_path / "older")
    ranks(keep_and_save, 2, older, 1, config={"ddp": True}, env=told(folder, 2))
    assert ranks(resume, 2, older, "1", config={"ddp": True}, env=told(folder, 3)) == [(2, None)] * 2
    # Without a restart in place the file that is asked for is loaded, whatever lies in memory.
    assert ranks(resume, 2, older, "1", config={"ddp": True}, env=told(folder, 0)) == [(1, None)] * 2


def test_a_generation_counts_only_if_all_ranks_have_it(ranks, folder):
    """As after a kill: rank 1 has not come to the last copy, and the head of another one was cut."""

    def found():
        from support.training.checkpoint_training import Training

        run = Training(seed=9)
        return run.smp.newest_memory_checkpoint()

    ranks(train_and_keep, 2, 4, 4, config={"ddp": True}, env=told(folder))
    ends = {rank: generations_of(Path(folder), rank) for rank in (0, 1)}
    assert ends == {rank: [Generation(0, 3), Generation(0, 4)] for rank in (0, 1)}
    head_path(Path(folder), Generation(0, 4), 1).unlink()
    assert ranks(found, 2, config={"ddp": True}, env=told(folder, 1)) == [3, 3]
    cut = head_path(Path(folder), Generation(0, 3), 0)
    cut.write_bytes(cut.read_bytes()[:-200])
    assert ranks(found, 2, config={"ddp": True}, env=told(folder, 1)) == [None, None]
    assert ranks(found, 1, env=told(folder, 1)) == [None]  # nor for another number of ranks


def _built(build):
    """The tensors of a file by name, and the rest with names in their place."""
    tensors = {}

    def keep(name, tensor):
        tensors[name] = tensor.clone()
        return name

    return tensors, build(keep)


def _replace(module, name, value):
    setattr(module, name, value)


@pytest.mark.parametrize(
    ("change", "is_known"),
    [
        ("nothing", True),
        ("a step", True),
        ("other settings", True),
        ("a weight elsewhere", True),  # its value is taken, and it lies where it was
        ("a weight that is frozen", False),
        ("another buffer", False),
        ("another module", False),
        ("loaded state", False),
        ("more state", False),
        ("no optimizer", False),
    ],
)
def test_what_is_copied_is_worked_out_again_only_where_more_than_values_has_changed(solo, change, is_known):
    from support.training.checkpoint_training import Training

    from smp_runtime.checkpoint.memory.known_contents import KnownContents
    from smp_runtime.checkpoint.saving.save_plan import WriteShare, contents_of
    from smp_runtime.job import session

    solo({"fp16": True})
    run = Training()
    run.train(0, 1)
    here, net = session.current_session(), run.model.module
    share = WriteShare(here, None)
    known = KnownContents.of(here, run.model, run.optimizer, share)
    optimizer = None if change == "no optimizer" else run.optimizer
    changes = {
        "a step": lambda: run.train(1, 2),
        "other settings": lambda: run.optimizer.param_groups[0].update(lr=0.5),
        "a weight elsewhere": lambda: _replace(net.norm.weight, "data", torch.full_like(net.norm.weight.data, 3.0)),
        "a weight that is frozen": lambda: net.norm.bias.requires_grad_(False),
        "another buffer": lambda: _replace(net, "shift", torch.ones(8)),
        "another module": lambda: _replace(net, "norm", torch.nn.LayerNorm(8)),
        "loaded state": lambda: run.optimizer.load_state_dict(run.optimizer.state_dict()),
        "more state": lambda: next(iter(run.optimizer.state.values())).update(more=torch.ones(3)),
    }
    changes.get(change, lambda: None)()
    if change == "another module":
        run.model.module.norm.requires_grad_(False)
    found = KnownContents.of(here, run.model, optimizer, share)
    assert (found is known) == is_known
    fresh = contents_of(here, run.model, optimizer, share, as_held=True)
    assert (found.pieces, found.parameters, found.buffers) == (fresh.pieces, fresh.parameters, fresh.buffers)
    assert found.files.keys() == fresh.files.keys()
    for name, build in fresh.files.items():
        (expected, content), (tensors, same_content) = _built(build), _built(found.files[name])
        assert same_content == content
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def _written_between_copies():
    """Copies, the last ones after a script's writes; how often the first ones filled a unit, and the state at the end."""
    from support.training.checkpoint_training import Training, held

    from smp_runtime.sharding.flat_unit import ShardedUnit

    run, fills, original = Training(), [], ShardedUnit.fill_from_shard
    ShardedUnit.fill_from_shard = lambda unit: (fills.append(unit), original(unit))[1]
    try:
        for step in range(3):
            run.train(step, step + 1)
            assert run.smp.memory_checkpoint(run.model, run.optimizer, {"step": step + 1})
    finally:
        ShardedUnit.fill_from_shard = original
    for factor in (2.0, 3.0):
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.data.mul_(factor)
        assert run.smp.memory_checkpoint(run.model, run.optimizer, {"step": 3, "scheduler": run.scheduler.state_dict()})
    return len(fills), held(run)


@pytest.mark.parametrize("name", ["s2", "o2"])
def test_a_copy_reads_no_sharded_parameter_and_has_what_the_script_has_written(ranks, folder, name):
    world, config = TOPOLOGIES[name]
    before = ranks(_written_between_copies, world, config=config, env=told(folder))
    after = ranks(go_on, world, f"{folder}/no-files", 4, config=config, env=told(folder, 1))
    for (fills, kept), (_, _, loaded, _, _) in zip(before, after, strict=True):
        assert fills == 0  # which would also warn that the script reads values
        assert all(torch.equal(a, b) for a, b in zip(kept, loaded, strict=True))


def test_what_is_known_of_a_model_does_not_keep_it_alive(solo, folder, monkeypatch):
    for name, value in told(folder).items():
        monkeypatch.setenv(name, value)
    solo({})
    model = smp.DistributedModel(torch.nn.Linear(4, 4))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert smp.memory_checkpoint(model, optimizer)
    weak = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert weak() is None


def test_without_room_in_shared_memory_training_goes_on_without_copies(solo, folder, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("SMP_MEMORY_FOLDER", folder)
    for name, value in told(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    solo({})
    model = smp.DistributedModel(torch.nn.Linear(64, 64))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not smp.memory_checkpoint(model, optimizer)
    assert not smp.memory_checkpoint(model, optimizer)
    told_once = [record.getMessage() for record in caplog.records if "memory checkpoints end" in record.getMessage()]
    assert len(told_once) == 1
    assert "take 33,280 bytes of shared memory" in told_once[0]
    assert "No space left on device" in told_once[0]


def test_a_rank_without_room_ends_the_copies_of_all(ranks, folder):
    def keep():
        import os
        import time

        from support.training.checkpoint_training import Training

        from smp_runtime.checkpoint.memory import copying

        def refuse(*_):
            raise OSError(28, "No space left on device")

        os.environ.pop("SMP_MEMORY_CHECKPOINT_STEPS")  # so that the ranks agree on how often: always
        share, copying.SHARE_OF_STEP = copying.SHARE_OF_STEP, 1e9
        real, run, found = os.posix_fallocate, Training(), []
        try:
            for step in range(7):
                run.train(step, step + 1)
                if step == 4:  # copies are larger from now on, for which rank 1 gets no memory
                    for state in run.optimizer.state.values():
                        state["more"] = state["exp_avg"].clone()
                    if run.smp.rank() == 1:
                        os.posix_fallocate = refuse
                        while not os.path.exists(os.path.join(os.environ["SMP_MEMORY_FOLDER"], "0.5.0.head")):
                            time.sleep(0.01)  # until rank 0 has its own
                found.append(run.smp.memory_checkpoint())
            return found
        finally:
            os.posix_fallocate, copying.SHARE_OF_STEP = real, share

    one, two = ranks(keep, 2, config={"ddp": True, "shard_optimizer_state": True}, env=told(folder))
    assert one == [True] * 5 + [False] * 2
    assert two == [True] * 4 + [False] * 3
    assert not list(Path(folder).glob("*.head"))


def test_without_the_variable_nothing_is_copied(solo, folder, monkeypatch):
    monkeypatch.setenv("SMP_MEMORY_FOLDER", folder)
    solo({})
    model = smp.DistributedModel(torch.nn.Linear(4, 4))
    assert not smp.memory_checkpoint(model)
    assert os.listdir(folder) == []


def test_slots_and_stand_ins():
    tensors = [torch.arange(5, dtype=torch.int16), torch.tensor(2.5), torch.empty(0, 3), torch.ones(2, 2).bfloat16()]
    slots = slots_of(tensors)
    assert [slot.offset for slot in slots] == [0, 64, 128, 128]
    content = {"a": [stand_in(1), "word"], "b": {"c": stand_in(3), "d": 7}}
    found = with_tensors(deserialize(serialize(content)), tensors)
    assert found == {"a": [tensors[1], "word"], "b": {"c": found["b"]["c"], "d": 7}}
    assert found["b"]["c"] is tensors[3]


def test_data_are_read_as_they_were_written_and_not_changed_by_readers(tmp_path):
    tensors = [torch.randn(3, 5), torch.tensor(7), torch.empty(0)]
    slots = slots_of(tensors)
    for target, tensor in zip(Data(tmp_path / "data", slots, new=True).tensors, tensors, strict=True):
        target.copy_(tensor)
    read = Data(tmp_path / "data", slots, new=False)
    assert all(torch.equal(a, b) for a, b in zip(read.tensors, tensors, strict=True))
    read.tensors[0].zero_()
    assert torch.equal(Data(tmp_path / "data", slots, new=False).tensors[0], tensors[0])
    with pytest.raises(OSError, match="fewer than"):
        Data(tmp_path / "data", slots_of([torch.empty(9000)]), new=False)


def test_the_newer_copy_stays_until_the_next_is_complete(tmp_path):
    rooms, slots = Rooms(tmp_path, 0, 0), slots_of([torch.empty(8)])
    used = []
    for number in (1, 2, 3, 4):
        index, data = rooms.make_room(slots)
        assert rooms.newest == (Generation(0, number - 1) if number > 1 else None)
        assert generations_of(tmp_path, 0) == ([Generation(0, number - 1)] if number > 1 else [])
        used.append(data.path.name)
        rooms.complete(index, Generation(0, number), {"layout": "x"})
    assert used[:2] == used[2:]
    assert used[0] != used[1]
    bigger = slots_of([torch.empty(100)])
    index, data = rooms.make_room(bigger)  # another size: another file, and the former is gone
    assert data.path.name not in used
    assert len(list(tmp_path.glob("*.data"))) == 2
    rooms.clear()
    assert list(tmp_path.iterdir()) == []


def test_ranks_see_how_far_the_others_are(tmp_path):
    one, two = CopyProgress(tmp_path, 0, 3), CopyProgress(tmp_path, 0, 3)
    one.note(0, 5)
    two.note(1, 4)
    assert two.least([0, 1]) == 4
    assert one.least([0, 1, 2]) == 0
    assert one.wait([0, 1], 4, 0.0)
    assert not one.wait([0, 1], 5, 0.01)
    two.turn_off(1)
    assert one.least([0, 1]) is None
    assert not one.wait([0, 1], 1, 60.0)  # at once: it will not come


def test_only_what_earlier_starts_have_left_is_removed(tmp_path):
    kept = ["1.7.0.head", "1.0.1.data", "0.progress", "1.0.1.layout"]
    for name in [*kept, "0.7.0.head", "0.9.1.head", "0.1.2.data", "0.0.1.data", "0.0.2.layout"]:
        (tmp_path / name).touch()
    (tmp_path / "0.0.0.resumed").mkdir()
    (tmp_path / "0.0.0.resumed" / "user_content.pt").touch()
    remove_older(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_copies_are_made_as_often_as_they_cost_three_percent():
    def interval(given, copy, step):
        found = Interval(given)
        now = 0.0
        for _ in range(6):
            now += step
            found.step_ended(now)
            now += copy
            found.call_ended(now, copy)
        found.agree([None, found.measured()])
        return found.steps

    assert interval(None, 0.0005, 0.02) == 1
    assert interval(None, 0.0029, 0.05) == 2
    assert interval(None, 0.0029, 0.01) == 10
    assert interval(7, 0.003, 0.01) == 7
    first = Interval(None)
    first.agree([None, None])
    assert first.steps == 1  # as long as nobody knows


PLANNED = {
    "dp2": (2, {"ddp": True}),
    "o2": (2, {"ddp": True, "shard_optimizer_state": True}),
    "pp2": (2, {"partitions": 2, "microbatches": 2}),
    "tp2": (2, {"ddp": True, "tensor_parallel_degree": 2}),
    "s2": (2, {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 2000}),
}


@pytest.mark.parametrize(
    ("name", "half"),
    [
        pytest.param(name, half, marks=() if (name, half) in {("s2", True), ("pp2", False)} else pytest.mark.full)
        for name in PLANNED
        for half in (False, True)
    ],
)
def test_copies_take_the_memory_that_is_planned(ranks, folder, name, half):
    def keep(hidden):
        import torch
        from torch import nn

        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
            layers = [nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)) for _ in range(4)]
        model = smp.DistributedModel(nn.Sequential(*layers))
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

        @smp.step
        def step(model, x):
            loss = model(x).float().square().mean()
            model.backward(loss)
            return loss

        for _ in range(2):
            optimizer.zero_grad()
            step(model, torch.ones(4, hidden))
            optimizer.step()
            assert smp.memory_checkpoint(model, optimizer)

    hidden = 64
    world, config = PLANNED[name]
    config = {**config, **({"bf16": True} if half else {})}
    ranks(keep, world, hidden, config=config, env=told(folder))
    measured = sum(path.stat().st_size for path in Path(folder).iterdir())
    layers = [
        torch.nn.Sequential(torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)) for _ in range(4)
    ]
    wanted = {"SMP_MEMORY_CHECKPOINT": "1"}
    model = torch.nn.Sequential(*layers)
    planned = plan(model, "ml.c5.xlarge", 1, config, processes_per_host=world, environment=wanted)
    heads = sum(path.stat().st_size for path in Path(folder).iterdir() if path.suffix != ".data")
    assert measured - heads == pytest.approx(planned.memory_checkpoint_bytes, rel=0.02)
    assert heads < 0.1 * measured
