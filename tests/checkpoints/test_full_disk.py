"""A full disk is named, with what was to be written and what is free; nothing half-made is left, and the former one stays."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint.files.atomic_file import write_tensors
from smp_runtime.checkpoint.files.disk_space import bytes_of, naming_full_disk
from smp_runtime.checkpoint.folder_lock import LOCK
from smp_runtime.errors import CheckpointError

#: Bytes of a model's weights, and of its first save's files about three times that.
_WEIGHTS = 400 * 400 * 4


@pytest.fixture
def disk(tmp_path):
    """A disk of 4 MB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small disk takes more rights: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.fixture
def one(solo):
    """A model with an optimizer, whose state takes two thirds of a megabyte three times."""
    solo({})
    model = smp.DistributedModel(nn.Linear(400, 400, bias=False))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 400)).sum().backward()
    optimizer.step()
    return model, optimizer


def _filled(disk, leaving: int) -> Path:
    file = disk / "filling"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    file.write_bytes(b"\0" * (free - leaving))
    return file


def _everything(disk) -> dict[str, bytes]:
    return {str(p.relative_to(disk)): p.read_bytes() for p in disk.rglob("*") if p.is_file() and p.name != LOCK}


@pytest.mark.parametrize("leaving", [0, 20_000, 800_000])
@pytest.mark.parametrize("kind", ["partial", "async", "full", "model.safetensors"])
def test_a_save_on_a_full_disk_names_it_and_leaves_the_former(disk, one, kind, leaving):
    if kind == "model.safetensors":
        pytest.importorskip("safetensors")
    tag = {"partial": "a", "async": "a"}.get(kind, kind)

    def save(content):
        smp.save_checkpoint(
            str(disk), tag=tag, partial=kind in ("partial", "async"), user_content=content, async_save=kind == "async"
        )
        smp.wait_for_checkpoint()

    save(1)
    filling = _filled(disk, leaving)
    before = _everything(disk)
    with pytest.raises(
        CheckpointError,
        match=r"the disk is full \(it takes (?:[\d,]+|more) bytes, and [\d,]+ of 4,194,304 bytes are free",
    ):
        save(2)
    assert _everything(disk) == before
    filling.unlink()
    assert smp.resume_from_checkpoint(str(disk), tag=tag, partial=kind in ("partial", "async")) == 1
    save(3)
    assert smp.resume_from_checkpoint(str(disk), tag=tag, partial=kind in ("partial", "async")) == 3


@pytest.mark.parametrize("leaving", [0, 100_000])
def test_smp_save_on_a_full_disk_names_it_and_leaves_the_former(disk, solo, leaving):
    solo({})
    smp.save({"x": torch.ones(10)}, str(disk / "object.pt"), partial=False)
    _filled(disk, leaving)
    before = _everything(disk)
    with pytest.raises(
        CheckpointError, match=r"object.pt cannot be written: the disk is full \(it takes 400,000 bytes"
    ):
        smp.save({"x": torch.ones(100_000)}, str(disk / "object.pt"), partial=False)
    assert _everything(disk) == before
    assert smp.load(str(disk / "object.pt"), partial=False)["x"].sum() == 10


class _FullDisk:
    """A file on a disk with room for some bytes, where none can be mounted."""

    def __init__(self, file, room: int) -> None:
        self._file, self._room = file, room

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, data) -> int:
        self._room -= memoryview(data).nbytes
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)


@pytest.mark.parametrize("room", [0, 100, 5_000])
def test_what_torch_says_of_a_full_disk_is_not_what_is_told(tmp_path, room):
    from smp_runtime.checkpoint.files import atomic_file

    with (
        mock.patch.object(atomic_file, "open", lambda *a, **o: _FullDisk(open(*a, **o), room), create=True),
        pytest.raises(
            CheckpointError, match=r"w.pt cannot be written: the disk is full \(it takes 40,000 bytes.*No space left"
        ),
    ):
        write_tensors({"a": torch.ones(10_000)}, tmp_path / "w.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "said"), [(errno.EDQUOT, "quota"), (errno.EFBIG, "larger than this process")])
def test_other_limits_are_named_too_and_other_errors_stay(tmp_path, number, said):
    with pytest.raises(CheckpointError, match=said), naming_full_disk(tmp_path / "gone" / "file", None):
        raise OSError(number, "…")
    with pytest.raises(PermissionError), naming_full_disk(tmp_path / "file", 1):
        raise PermissionError(errno.EACCES, "…")


def test_bytes_of_what_is_written():
    shared = torch.ones(100)
    assert bytes_of(b"abc") == 3
    assert bytes_of({"a": shared, "b": [shared[:3], {"c": torch.zeros(2, dtype=torch.int8)}]}) == 402
    many: list = []
    for _ in range(200):  # each twice in the next: walking through all of them would never end
        many = [many, many]
    assert bytes_of(many) == 0
    round_about: dict = {}
    round_about["self"] = round_about
    with contextlib.suppress(RecursionError):
        assert bytes_of(round_about) == 0
