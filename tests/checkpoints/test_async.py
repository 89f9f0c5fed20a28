"""Asynchronous saving: the state of the moment of the call, whole files, errors that are told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
from support.training.checkpoint_training import TOPOLOGIES, Training

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint import save_partial as saving
from smp_runtime.checkpoint.files.manifest import newest_name
from smp_runtime.checkpoint.folder_lock import LOCK
from smp_runtime.errors import CheckpointError
from smp_runtime.tensors.host_memory.snapshot import TensorSnapshot


def test_the_state_is_that_of_the_call_although_training_went_on(ranks, tmp_path):
    def run(path):
        from support.training.checkpoint_training import Training

        run = Training()
        run.train(0, 3)
        run.save(path, "now", 3)
        run.save(path, "later", 3, async_save=True)
        run.train(3, 4)
        run.smp.wait_for_checkpoint()
        run.resume(path, "now")
        run.save(path, "again", 3, async_save=True)  # buffers are used again
        losses = run.train(3, 6)
        return losses

    def resumed(path, tag):
        from support.training.checkpoint_training import Training

        run = Training(seed=9)
        assert run.resume(path, tag) == 3
        return run.train(3, 6)

    for name in ("pp2", "s2"):
        world, config = TOPOLOGIES[name]
        path = str(tmp_path / name)
        expected = ranks(run, world, path, config=config)
        for tag in ("later", "again"):
            for losses, alone in zip(ranks(resumed, world, path, tag, config=config), expected, strict=True):
                assert losses == pytest.approx(alone, abs=2e-6)
        assert newest_name(tmp_path / name) == "again_partial"


class _Slow:
    """Files that are written when a test lets them."""

    def __init__(self, monkeypatch) -> None:
        self.may_write = threading.Event()
        original = saving.write_recorded

        def write(content, path):
            assert self.may_write.wait(30)
            return original(content, path)

        monkeypatch.setattr(saving, "write_recorded", write)


def test_nothing_appears_before_all_is_written_and_the_next_save_waits(solo, tmp_path, monkeypatch):
    solo({})
    run = Training()
    run.train(0, 1)
    slow = _Slow(monkeypatch)
    run.save(str(tmp_path), "1", 1, async_save=True)
    run.train(1, 2)
    assert newest_name(tmp_path) is None
    threading.Timer(0.3, slow.may_write.set).start()
    run.save(str(tmp_path), "2", 2, async_save=True, num_kept_partial_checkpoints=2)
    assert (tmp_path / "1_partial" / "manifest.json").is_file()
    smp.wait_for_checkpoint()
    assert newest_name(tmp_path) == "2_partial"


def test_a_failure_surfaces_at_the_next_save_on_every_rank_and_the_former_stays(ranks, tmp_path):
    def run(path):
        from support.training.checkpoint_training import Training

        from smp_runtime.checkpoint import save_partial as saving

        run = Training()
        run.train(0, 1)
        run.save(path, "good", 1)
        original = saving.write_recorded

        def full_disk(content, file):
            if run.smp.rank() == 1:
                raise OSError(28, "No space left on device")
            return original(content, file)

        saving.write_recorded = full_disk
        try:
            run.save(path, "bad", 1, async_save=True)
            run.train(1, 3)
            with pytest.raises(CheckpointError, match=r"before this one.*rank 1: OSError.*No space left"):
                run.save(path, "next", 3, async_save=True)
        finally:
            saving.write_recorded = original
        run.smp.wait_for_checkpoint()
        assert run.resume(path) == 1
        run.save(path, "next", 3, async_save=True)
        # The end of the session waits for it.

    ranks(run, 2, str(tmp_path), config={"ddp": True})
    deadline = time.monotonic() + 20
    while newest_name(tmp_path) != "next_partial" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != LOCK) == ["good_partial", "newest", "next_partial"]


class _Remembering(torch.nn.Linear):
    """With a state of its own making."""

    def __init__(self):
        super().__init__(4, 4)
        self.seen = {"most": torch.zeros(2), "counts": [0]}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_what_is_not_elementwise_is_that_of_the_call_too(solo, tmp_path, monkeypatch):
    """A learning rate that is a tensor, tensors in lists of the optimizer's state, a module's own state."""
    solo({})
    model = smp.DistributedModel(_Remembering())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5)))
    state = optimizer.state[model.module.weight]
    state["history"] = [torch.ones(3), {"last": torch.ones(1)}]
    slow = _Slow(monkeypatch)
    smp.save_checkpoint(str(tmp_path), tag="1", async_save=True)
    with torch.no_grad():
        optimizer.param_groups[0]["lr"].fill_(7.0)
        for value in (state["history"][0], state["history"][1]["last"], model.module.seen["most"]):
            value.fill_(7.0)
    model.module.seen["counts"].append(7)
    state["history"].append(7)
    slow.may_write.set()
    smp.wait_for_checkpoint()
    smp.resume_from_checkpoint(str(tmp_path))
    history = optimizer.state[model.module.weight]["history"]
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
    assert (history[0].tolist(), history[1]["last"].tolist(), len(history)) == ([1, 1, 1], [1], 2)
    assert (model.module.seen["most"].tolist(), model.module.seen["counts"]) == ([0, 0], [0])


class _SlowCopies:
    """Copies of the optimizer's state that a test lets go on."""

    def __init__(self, monkeypatch) -> None:
        self.may_copy = threading.Event()
        original = TensorSnapshot.copy_rest

        def copy(snapshot, arena):
            assert self.may_copy.wait(30)
            original(snapshot, arena)

        monkeypatch.setattr(TensorSnapshot, "copy_rest", copy)


def test_an_update_waits_until_the_state_is_copied_and_weights_are_copied_at_once(solo, tmp_path, monkeypatch):
    solo({})
    run = Training()
    run.train(0, 2)
    states = [state["exp_avg"] for state in run.optimizer.state.values()]
    expected = [state.clone() for state in states]
    weights = [parameter.detach().clone() for parameter in run.model.parameters()]
    slow = _SlowCopies(monkeypatch)
    run.save(str(tmp_path), "1", 2, async_save=True)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(2)
    threading.Timer(0.3, slow.may_copy.set).start()
    run.train(2, 4)
    assert slow.may_copy.is_set()
    smp.wait_for_checkpoint()
    assert not any(torch.equal(a, b) for a, b in zip(states, expected, strict=True))
    run.resume(str(tmp_path), "1")
    found = [state["exp_avg"] for state in run.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), weights, strict=True))


def test_a_state_that_something_else_changes_meanwhile_fails_the_save_and_later_ones_copy_at_once(
    solo, tmp_path, monkeypatch
):
    solo({})
    run = Training()
    run.train(0, 1)
    run.save(str(tmp_path), "0", 1)
    slow = _SlowCopies(monkeypatch)
    state = next(iter(run.optimizer.state.values()))
    for tag in ("1", "2"):
        before = state["exp_avg"].clone()
        slow.may_copy.clear()
        run.save(str(tmp_path), tag, 1, async_save=True)
        state["exp_avg"].add_(1)
        slow.may_copy.set()
        if tag == "1":
            with pytest.raises(
                CheckpointError, match="changed in place while the save copied them.*later saves .* at once"
            ):
                smp.wait_for_checkpoint()
            assert newest_name(tmp_path) == "0_partial"
    smp.wait_for_checkpoint()
    run.resume(str(tmp_path), "2")
    assert torch.equal(next(iter(run.optimizer.state.values()))["exp_avg"], before)


def _changed_at_once(path):
    """A save whose copies wait; then every tensor that the script can reach is changed. Return what was lost, by rank."""
    from support.training.checkpoint_training import Training, held

    from smp_runtime.tensors.host_memory import snapshot

    run = Training()
    run.train(0, 2)
    run.save(path, "0", 2, async_save=True)  # agrees with the other ranks
    run.smp.wait_for_checkpoint()
    expected = held(run)
    may_copy, original = threading.Event(), snapshot.TensorSnapshot.copy_rest

    def copy_rest(taken, arena):
        assert may_copy.wait(30)
        original(taken, arena)

    snapshot.TensorSnapshot.copy_rest = copy_rest
    try:
        run.save(path, "1", 2, async_save=True)
        threading.Timer(0.2, may_copy.set).start()
        with torch.no_grad():
            for parameter in run.model.local_parameters():
                parameter.data.mul_(2)
            for group in run.optimizer.param_groups:
                for updated in group["params"]:
                    updated.data.mul_(3)
            for buffer in dict(run.model.local_named_buffers()).values():
                buffer.mul_(2)
        run.train(2, 3)
        run.smp.wait_for_checkpoint()
    finally:
        snapshot.TensorSnapshot.copy_rest = original
    assert not all(torch.equal(a, b) for a, b in zip(held(run), expected, strict=True))
    run.resume(path, "1")
    return [index for index, (a, b) in enumerate(zip(held(run), expected, strict=True)) if not torch.equal(a, b)]


@pytest.mark.parametrize(
    ("name", "extra"),
    [("s2", {}), ("s2", {"bf16": True}), ("dp2", {"fp16": True}), ("o2", {"bf16": True}), ("pp2", {})],
)
def test_parameters_changed_right_after_the_call_are_saved_as_they_were(ranks, tmp_path, name, extra):
    """Parts of sharded parameters and float32 weights too, which a thread copies: a script's write to them waits."""
    world, config = TOPOLOGIES[name]
    assert ranks(_changed_at_once, world, str(tmp_path), config={**config, **extra}) == [[]] * world


def test_a_save_after_the_first_calls_no_other_rank_on_the_scripts_thread(ranks, tmp_path):
    def run(path):
        from support.training.checkpoint_training import Training

        from smp_runtime.comm.control import ControlPlane

        run = Training()
        run.train(0, 1)
        run.save(path, "0", 1, async_save=True)
        run.smp.wait_for_checkpoint()
        called = []
        names = ("broadcast", "allgather", "gather", "send", "receive")
        originals = {name: getattr(ControlPlane, name) for name in names}
        for name in names:
            setattr(ControlPlane, name, lambda *_, name=name, **__: called.append(name))
        collectives = [
            name for name in ("all_gather", "all_reduce", "broadcast", "barrier") if hasattr(torch.distributed, name)
        ]
        theirs = {name: getattr(torch.distributed, name) for name in collectives}
        for name in collectives:
            setattr(torch.distributed, name, lambda *_, name=name, **__: called.append(name))
        try:
            run.save(path, "1", 1, async_save=True)
            run.smp.wait_for_checkpoint()
        finally:
            for name, original in originals.items():
                setattr(ControlPlane, name, original)
            for name, original in theirs.items():
                setattr(torch.distributed, name, original)
        assert run.resume(path, "1") == 1
        return called

    for name in ("s2", "pp2"):
        world, config = TOPOLOGIES[name]
        assert ranks(run, world, str(tmp_path / name), config=config) == [[]] * world


def test_a_failure_to_begin_is_told_to_all_behind_their_backs(ranks, tmp_path):
    def run(path):
        from support.training.checkpoint_training import Training

        run = Training()
        run.train(0, 1)
        run.save(path, "good", 1, async_save=True)
        run.smp.wait_for_checkpoint()
        content = {"step": object()} if run.smp.rank() == 0 else {}
        saves = {"tag": "bad", "user_content": content, "async_save": True}
        if run.smp.rank() == 0:  # whose content it is hears of it at once
            with pytest.raises(CheckpointError, match="rank 0.*user_content"):
                run.smp.save_checkpoint(path, **saves)
        else:
            run.smp.save_checkpoint(path, **saves)
            with pytest.raises(CheckpointError, match="rank 0.*user_content"):
                run.smp.wait_for_checkpoint()
        assert run.resume(path) == 1
        run.save(path, "next", 1, async_save=True)
        run.smp.wait_for_checkpoint()

    ranks(run, 2, str(tmp_path), config={"ddp": True})
    assert newest_name(tmp_path) == "next_partial"


def test_a_folder_that_other_hosts_share_than_at_the_first_save_is_refused_once(ranks, tmp_path):
    def run(path):
        import dataclasses

        from support.training.checkpoint_training import Training

        from smp_runtime.job.session import current_session

        run = Training()
        run.train(0, 1)
        run.save(path, "0", 1, async_save=True)
        known = saving.Saver.of(current_session())._agreed
        for folder, found in list(known.items()):
            known[folder] = dataclasses.replace(found, hosts=[0, 1])
        run.save(path, "1", 1, async_save=True)
        with pytest.raises(CheckpointError, match="shared by all hosts and is not any more.*still the newest"):
            run.smp.wait_for_checkpoint()
        run.save(path, "2", 1, async_save=True)

    ranks(run, 2, str(tmp_path), config={"ddp": True})
    deadline = time.monotonic() + 20
    while newest_name(tmp_path) != "2_partial" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != LOCK) == ["0_partial", "2_partial", "newest"]


def test_a_layout_that_is_set_after_the_first_save_holds_from_the_next_but_one(ranks, tmp_path):
    def run(path):
        import os
        from unittest import mock

        from support.training.checkpoint_training import Training

        run, told = Training(), []
        run.train(0, 1)
        run.save(path, "0", 1, async_save=True)
        layout = {"SMP_CHECKPOINT_LAYOUT": "flat_groups"} if run.smp.rank() == 0 else {}
        with (
            mock.patch.dict(os.environ, layout),
            mock.patch.object(saving.logger, "warning", lambda *of: told.append(of)),
        ):
            for tag in ("1", "2", "3"):
                run.save(path, tag, 1, async_save=True)
        run.smp.wait_for_checkpoint()
        assert run.resume(path, "2") == 1
        return [str(of[1]) for of in told]

    world, config = TOPOLOGIES["s2"]
    warned = ranks(run, world, str(tmp_path), config=config)
    assert warned == [[str(tmp_path / "1_partial")], []]
    for tag, is_flat in {"0": False, "1": False, "2": True, "3": True}.items():
        for rank in range(world):
            file = tmp_path / f"{tag}_partial" / f"optimizer_{rank}.pt"
            assert ("fp32_flat_groups" in torch.load(file, weights_only=True)) == is_flat


def test_a_relative_path_is_that_of_the_call_although_the_script_has_gone_elsewhere(solo, tmp_path, monkeypatch):
    solo({})
    run = Training()
    run.train(0, 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    run.save("path", "0", 1, async_save=True)
    smp.wait_for_checkpoint()
    slow = _Slow(monkeypatch)
    run.save("path", "1", 1, async_save=True)
    monkeypatch.chdir(elsewhere)
    slow.may_write.set()
    smp.wait_for_checkpoint()
    assert newest_name(tmp_path / "path") == "1_partial"
    assert list(elsewhere.iterdir()) == []


def test_a_state_that_is_replaced_meanwhile_is_that_of_the_call(solo, tmp_path, monkeypatch):
    solo({})
    run = Training()
    run.train(0, 1)
    expected = [state["exp_avg"].clone() for state in run.optimizer.state.values()]
    slow = _SlowCopies(monkeypatch)
    run.save(str(tmp_path), "1", 1, async_save=True)
    for state in run.optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 7.0)
    slow.may_copy.set()
    smp.wait_for_checkpoint()
    run.resume(str(tmp_path), "1")
    found = [state["exp_avg"] for state in run.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_refused_user_content_is_told_at_once(solo, tmp_path):
    solo({})
    run = Training()
    with pytest.raises(CheckpointError, match="user_content"):
        smp.save_checkpoint(str(tmp_path), tag="1", model=run.model, user_content=time.localtime, async_save=True)


_LAST = """
import sys, torch
import smdistributed.modelparallel.torch as smp
smp.init({})
model = smp.DistributedModel(torch.nn.Linear(300, 300))
with torch.no_grad():
    model.module.weight.fill_(5.0)
smp.save_checkpoint(sys.argv[1], tag="last", user_content=7, async_save=True)
with torch.no_grad():
    model.module.weight.fill_(6.0)
"""


def test_the_end_of_the_process_completes_the_save(solo, tmp_path):
    subprocess.run([sys.executable, "-c", _LAST, str(tmp_path)], check=True, timeout=100)
    solo({})
    model = smp.DistributedModel(torch.nn.Linear(300, 300))
    assert smp.resume_from_checkpoint(str(tmp_path)) == 7
    assert torch.all(model.module.weight == 5.0)
