"""What fails, or is killed, on one rank or host: told to all, and every host can go on from the same checkpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.faults.damaged_checkpoints import in_older_form
from support.training.checkpoint_training import TOPOLOGIES

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint import folder_transaction as folder
from smp_runtime.checkpoint import save_and_resume as checkpoints
from smp_runtime.checkpoint import save_partial as saving
from smp_runtime.checkpoint.files.manifest import checkpoints_in, whole_checkpoints
from smp_runtime.checkpoint.folder_lock import LOCK
from smp_runtime.checkpoint.folder_transaction import FolderRemoval, FolderTransaction
from smp_runtime.checkpoint.saving import older_folders
from smp_runtime.errors import CheckpointError
from smp_runtime.job import session


def _names(path) -> list[str]:
    """What lies there besides the lock, which a job has until it ends, once what is removed is gone."""
    if session.is_initialized():
        FolderRemoval.of(session.current_session()).wait()
    return sorted(p.name for p in Path(path).iterdir() if p.name != LOCK)


def _model():
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    return smp.DistributedModel(torch.nn.Linear(8, 8))


def _on_own_host(path) -> str:
    """Every rank is a host of its own, with a folder of its own; call it before ``smp.init``."""
    os.environ["SMP_HOST"] = f"algo-{int(os.environ['RANK']) + 1}"
    return f"{path}/{os.environ['SMP_HOST']}"


def _broken(*args, **kwargs):
    raise RuntimeError("broken")


@contextlib.contextmanager
def _fails(owner, name: str, rank: int):
    """A function does not work on one rank."""
    import smdistributed.modelparallel.torch as smp

    with mock.patch.object(owner, name, _broken) if smp.rank() == rank else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _killed_before(name: str):
    """The last host's process is killed in a step of the commit, and the others' before they notice."""
    with (
        _fails(FolderTransaction, name, 1),
        mock.patch.object(FolderTransaction, "_withdraw"),
        mock.patch.object(FolderTransaction, "abandon"),
    ):
        yield


def test_when_one_host_cannot_publish_all_go_back_to_the_former(ranks, tmp_path):
    def run(path):
        import smdistributed.modelparallel.torch as smp

        mine = _on_own_host(path)
        smp.init({"ddp": True})
        model = _model()
        with _fails(FolderTransaction, "_publish", 1), pytest.raises(CheckpointError, match="rank 1: RuntimeError"):
            smp.save_checkpoint(mine, tag="a", model=model)
        assert _names(mine) == []
        smp.save_checkpoint(mine, tag="a", user_content=1)
        for rank in range(2):
            for tag in "ab":  # in the place of the former, and beside it
                with (
                    _fails(FolderTransaction, "_publish", rank),
                    pytest.raises(CheckpointError, match=f"rank {rank}: RuntimeError: broken.*still the newest"),
                ):
                    smp.save_checkpoint(mine, tag=tag, user_content=2, num_kept_partial_checkpoints=1)
                assert _names(mine) == ["a_partial", "newest"]
                assert Path(mine, "newest").read_text() == "a_partial"
        assert smp.resume_from_checkpoint(mine) == 1

    ranks(run, 2, str(tmp_path), init=False)


def test_publishing_that_breaks_off_halfway_is_taken_back(solo, tmp_path):
    solo({})
    model = _model()
    smp.save_checkpoint(str(tmp_path), tag="a", user_content=1)
    with mock.patch.object(folder, "_point", _broken), pytest.raises(CheckpointError, match="rank 0: RuntimeError"):
        smp.save_checkpoint(str(tmp_path), tag="a", user_content=2)
    assert _names(tmp_path) == ["a_partial", "newest"]
    assert smp.resume_from_checkpoint(str(tmp_path)) == 1
    assert model.partitioned


def test_hosts_killed_between_their_renames_resume_from_the_save_that_both_have(ranks, tmp_path):
    def run(path):
        import smdistributed.modelparallel.torch as smp

        mine = _on_own_host(path)
        smp.init({"ddp": True})
        model = _model()
        smp.save_checkpoint(mine, tag="a", user_content=1)
        for content in (2, 3):  # again before anything could be put in order
            with _killed_before("_publish"), pytest.raises(CheckpointError):
                smp.save_checkpoint(mine, tag="a", user_content=content)
            saves = [c.save for c in checkpoints_in(Path(mine), formers=True)]
            assert len(saves) == (content if smp.rank() == 0 else 1)
            assert smp.resume_from_checkpoint(mine) == smp.resume_from_checkpoint(mine, tag="a") == 1
        with _killed_before("_publish"), pytest.raises(CheckpointError):
            smp.save_checkpoint(mine, tag="b", user_content=4, num_kept_partial_checkpoints=1)
        assert smp.resume_from_checkpoint(mine) == 1
        if smp.rank() == 0:
            shutil.copytree(mine, f"{path}/copy")
            for former in Path(mine).glob(".a_partial*.old"):
                shutil.rmtree(former)
        smp.barrier()
        for tag in (None, "a"):
            with pytest.raises(CheckpointError, match="a_partial is not whole: hosts have different saves of it"):
                smp.resume_from_checkpoint(mine, tag=tag)
        smp.barrier()
        if smp.rank() == 0:
            shutil.rmtree(mine)
            shutil.copytree(f"{path}/copy", mine)
        smp.save_checkpoint(mine, tag="c", user_content=5)
        smp.wait_for_checkpoint()
        assert smp.resume_from_checkpoint(mine) == 5
        assert model.partitioned

    ranks(run, 2, str(tmp_path), init=False)
    assert _names(tmp_path / "algo-1") == ["a_partial", "b_partial", "c_partial", "newest"]
    assert _names(tmp_path / "algo-2") == ["a_partial", "c_partial", "newest"]
    saves = [{c.name: c.save for c in checkpoints_in(tmp_path / host)} for host in ("algo-1", "algo-2")]
    assert saves[0]["c_partial"] == saves[1]["c_partial"]


def test_a_manifest_of_before_there_were_saves_is_told_by_its_time(solo, tmp_path):
    solo({})
    model = _model()
    smp.save_checkpoint(str(tmp_path), tag="a", user_content=1)
    (found,) = whole_checkpoints(tmp_path)
    assert found.manifest is not None
    older = in_older_form(json.loads((found.folder / "manifest.json").read_text()), found.folder, 1)
    for later in ("save", "digest"):
        del older[later]
    (found.folder / "manifest.json").write_text(json.dumps(older))
    (older,) = whole_checkpoints(tmp_path)
    assert older.save == str(found.manifest.saved)
    assert smp.resume_from_checkpoint(str(tmp_path)) == 1
    assert model.partitioned


@pytest.mark.parametrize("in_background", [False, True])
def test_whatever_fails_on_one_rank_is_told_before_ranks_wait_for_each_other(ranks, tmp_path, in_background):
    def run(path, in_background):
        import smdistributed.modelparallel.torch as smp

        class _Unwritable:
            def to_json(self):
                _broken()

        def after(*args, **options):
            original(*args, **options)
            _broken()

        model = _model()
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        original = saving.contents_of

        def save(tag, content=None):
            with mock.patch.dict(os.environ, SMP_CHECKPOINT_LAYOUT="flat_groups"):  # for which ranks exchange parts
                smp.save_checkpoint(path, tag=tag, optimizer=optimizer, user_content=content, async_save=in_background)
                smp.wait_for_checkpoint()

        def refused(rank, tag):
            with pytest.raises(CheckpointError, match=rf"was not saved \(rank {rank}: RuntimeError: broken\)"):
                save(tag)

        for name in ("describe", "merge"):
            with _fails(saving, name, 0):
                refused(0, name)
        with mock.patch.object(saving, "merge", return_value=_Unwritable()):
            refused(0, "unwritable")
        for rank in range(2):
            with mock.patch.object(saving, "contents_of", after if smp.rank() == rank else original):
                refused(rank, "contents")
        for step in ("_restart", "_prepare", "_publish"):
            with _fails(FolderTransaction, step, 0):
                refused(0, step)
        save("good", 1)
        assert smp.resume_from_checkpoint(path) == 1

    world, config = TOPOLOGIES["s2"]
    ranks(run, world, str(tmp_path), in_background, config=config)
    assert _names(tmp_path) == ["good_partial", "newest"]


def test_resuming_that_fails_on_one_rank_is_told_to_all(ranks, tmp_path):
    def run(path):
        import smdistributed.modelparallel.torch as smp
        from smp_runtime.checkpoint import find_checkpoint as finding

        model = _model()
        smp.save_checkpoint(path, tag="a", model=model)
        with (
            _fails(checkpoints, "PartialLoad", 1),
            pytest.raises(RuntimeError if smp.rank() == 1 else CheckpointError, match="broken"),
        ):
            smp.resume_from_checkpoint(path)
        # While the files are read: the other rank must not wait for one that has left.
        for name in ("read_user_content", "restore_random_state"):
            with (
                _fails(checkpoints, name, 1),
                pytest.raises(RuntimeError if smp.rank() == 1 else CheckpointError, match="broken"),
            ):
                smp.resume_from_checkpoint(path)
        with _fails(finding, "checkpoints_in", 1), pytest.raises(CheckpointError, match="rank 1 .*broken"):
            smp.resume_from_checkpoint(path)
        smp.resume_from_checkpoint(path)

    ranks(run, 2, str(tmp_path), config={"ddp": True})


def test_what_cannot_be_removed_is_a_warning_and_the_checkpoint_is_saved(solo, tmp_path, caplog):
    solo({})
    model = _model()
    smp.save_checkpoint(str(tmp_path), tag="a")
    original = shutil.rmtree

    def rmtree(path, *args, **options):
        if Path(path).name.endswith((".removed", ".old")):
            raise PermissionError(13, "Permission denied")
        original(path, *args, **options)

    logging.getLogger("smp").propagate = True
    for tag in "ab":  # the former one in its place, and the one that is too many
        with caplog.at_level(logging.WARNING, logger="smp"), mock.patch.object(shutil, "rmtree", rmtree):
            smp.save_checkpoint(str(tmp_path), tag=tag, user_content=tag, num_kept_partial_checkpoints=1)
            smp.wait_for_checkpoint()
        assert "older ones could not be removed (PermissionError" in caplog.text
        caplog.clear()
        assert smp.resume_from_checkpoint(str(tmp_path)) == tag
    smp.save_checkpoint(str(tmp_path), tag="c", num_kept_partial_checkpoints=1)
    assert _names(tmp_path) == ["c_partial", "newest"]
    assert model.partitioned


def test_a_save_removes_what_killed_jobs_left_and_nothing_else(solo, tmp_path):
    solo({})
    model = _model()
    for tag in "abcd":
        smp.save_checkpoint(str(tmp_path), tag=tag, user_content=tag)
    foreign = ["mine_partial", ".a_partial.notes", ".x.old"]
    for name in (*foreign, ".k_partial.tmp", ".k_partial.removed"):
        (tmp_path / name).mkdir()
    shutil.copytree(tmp_path / "a_partial", tmp_path / ".a_partial.old")
    shutil.copytree(tmp_path / "b_partial", tmp_path / ".b_partial.2.old")
    (tmp_path / "b_partial" / "model_0.pt").unlink()  # not whole: the former is better than none
    (tmp_path / "c_partial").rename(tmp_path / ".c_partial.old")  # killed while it was replaced
    smp.save_checkpoint(str(tmp_path), tag="e")
    kept = {
        *foreign,
        "newest",
        "a_partial",
        "b_partial",
        ".b_partial.2.old",
        ".c_partial.old",
        "d_partial",
        "e_partial",
    }
    assert set(_names(tmp_path)) == kept
    assert smp.resume_from_checkpoint(str(tmp_path), tag="c") == "c"
    smp.save_checkpoint(str(tmp_path), tag="f", num_kept_partial_checkpoints=2)
    assert set(_names(tmp_path)) == {*foreign, "newest", "e_partial", "f_partial"}
    assert model.partitioned


def test_old_checkpoints_are_removed_while_training_goes_on(solo, tmp_path):
    solo({})
    model = _model()
    smp.save_checkpoint(str(tmp_path), tag="a")
    begun, goes_on = threading.Event(), threading.Event()
    original = shutil.rmtree

    def rmtree(path, *args, **options):
        begun.set()
        assert goes_on.wait(60)
        original(path, *args, **options)

    with mock.patch.object(shutil, "rmtree", rmtree):
        smp.save_checkpoint(str(tmp_path), tag="b", num_kept_partial_checkpoints=1)
        assert begun.wait(60)
        hidden = tmp_path / ".a_partial.removed"
        assert hidden.exists()
        assert not (tmp_path / "a_partial").exists()
        assert [found.name for found in checkpoints_in(tmp_path)] == ["b_partial"]
        goes_on.set()
        smp.shutdown()
    assert not hidden.exists()
    assert model.partitioned


def _keep_two(path, number):
    smp.save_checkpoint(str(path), tag=str(number), user_content=number, num_kept_partial_checkpoints=2)


def test_a_clock_that_is_put_back_changes_no_order(solo, tmp_path, monkeypatch):
    clock = iter([1000.0, 1010.0, 20.0, 30.0])
    monkeypatch.setattr(older_folders, "time", SimpleNamespace(time=lambda: next(clock)))
    for first in (0, 2):  # two jobs, the second on a host whose clock is wrong
        solo({})
        _kept = _model()
        for number in (first, first + 1):
            _keep_two(tmp_path, number)
    assert _names(tmp_path) == ["2_partial", "3_partial", "newest"]
    assert [found.name for found in checkpoints_in(tmp_path)] == ["3_partial", "2_partial"]
    (tmp_path / "3_partial" / "manifest.json").unlink()
    assert smp.resume_from_checkpoint(str(tmp_path)) == 2


def test_a_checkpoint_that_was_moved_elsewhere_and_linked_loads_and_its_link_is_removed_in_its_turn(
    solo, tmp_path, caplog
):
    solo({})
    _kept = _model()
    path, elsewhere = tmp_path / "path", tmp_path / "elsewhere"
    _keep_two(path, 0)
    (path / "0_partial").rename(elsewhere)
    (path / "0_partial").symlink_to(elsewhere)
    assert smp.resume_from_checkpoint(str(path)) == 0
    with caplog.at_level(logging.WARNING, logger="smp"):
        for number in (1, 2, 1):
            _keep_two(path, number)
            FolderRemoval.of(session.current_session()).wait()
    assert _names(path) == ["1_partial", "2_partial", "newest"]
    assert "could not be removed" not in caplog.text
    assert (elsewhere / "manifest.json").is_file()


@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_no_folder_is_named(solo, tmp_path, is_link):
    solo({})
    _kept = _model()

    def put(path):
        path.symlink_to(tmp_path / "nothing") if is_link else path.write_text("mine")

    put(tmp_path / "path")
    words = "path is a link to nothing" if is_link else "path is no folder"
    for partial in (True, False):
        with pytest.raises(
            CheckpointError, match=f"cannot be saved in .*because .*{words}; remove it, or give another"
        ):
            smp.save_checkpoint(str(tmp_path / "path" / "more"), tag="1", partial=partial)
    put(tmp_path / "1_partial")
    with pytest.raises(CheckpointError, match="1_partial is a file or a link to nothing.*no earlier one in"):
        smp.save_checkpoint(str(tmp_path), tag="1")
    assert _names(tmp_path) == ["1_partial", "path"]


def test_a_folder_that_is_removed_while_it_is_saved_into_is_named(solo, tmp_path, monkeypatch):
    solo({})
    _kept = _model()
    path = tmp_path / "path"
    _keep_two(path, 0)
    original = saving.write_recorded

    def write(content, file):
        shutil.rmtree(path, ignore_errors=True)
        return original(content, file)

    monkeypatch.setattr(saving, "write_recorded", write)
    with pytest.raises(CheckpointError, match=r"path/\.1_partial.*\.tmp was removed while.*there is no earlier one in"):
        _keep_two(path, 1)
    monkeypatch.setattr(saving, "write_recorded", original)
    _keep_two(path, 2)
    assert smp.resume_from_checkpoint(str(path)) == 2
