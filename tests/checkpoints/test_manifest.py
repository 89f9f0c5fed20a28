"""``manifest.json``: no changed letter is taken for what was saved, nothing that it says leads out of its folder."""

from __future__ import annotations

import json
import random

import pytest
import torch
from support.faults.damaged_checkpoints import in_older_form
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint.files.manifest import Manifest, checkpoints_in, read_manifest
from smp_runtime.checkpoint.files.opened_files import is_plain_name
from smp_runtime.checkpoint.files.records import digest_of
from smp_runtime.errors import CheckpointError, SMPUserError


@pytest.fixture
def saved(solo, tmp_path):
    """A model with an optimizer, and its checkpoint; gives the model, the optimizer and the manifest."""
    solo({})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    smp.save_checkpoint(str(tmp_path), tag="a", user_content=1)
    return model, optimizer, tmp_path / "a_partial" / "manifest.json"


def _changes(text: bytes, count: int, seed: int):
    chance = random.Random(seed)
    for _ in range(count):
        place = chance.randrange(len(text))
        other = bytes([chance.choice([b for b in range(256) if b != text[place]])])
        yield place, text[:place] + other + text[place + 1 :]


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.full)])
def test_a_changed_byte_is_noticed_wherever_it_is(saved, count):
    file = saved[2]
    text = file.read_bytes()
    before = json.loads(text)
    for place, changed in _changes(text, count, 16):
        file.write_bytes(changed)
        try:
            read_manifest(file.parent)
        except CheckpointError as error:
            assert "cannot be read" in str(error)
        else:  # a space in another place says the same
            assert json.loads(changed) == before, (place, changed[place - 20 : place + 20])


def test_an_older_manifest_loads_and_one_of_now_without_checksum_does_not(saved, tmp_path):
    _, _, file = saved
    data = json.loads(file.read_text())
    assert data["digest"] == digest_of(data)
    file.write_text(json.dumps(data, indent=4))  # in another layout
    assert smp.resume_from_checkpoint(str(tmp_path)) == 1
    del data["digest"]
    file.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="its checksum differs"):
        smp.resume_from_checkpoint(str(tmp_path))
    file.write_text(json.dumps(in_older_form(data, file.parent, 1)))
    assert smp.resume_from_checkpoint(str(tmp_path)) == 1
    file.write_text(json.dumps({**data, "format": 5, "library": "9.8.7"}))
    with pytest.raises(CheckpointError, match=r"it has format 5, of version 9.8.7 .* reads formats 1 to 4"):
        smp.resume_from_checkpoint(str(tmp_path))


def test_a_checkpoint_with_checksums_of_whole_files_loads_and_they_are_compared(saved, tmp_path):
    _, _, file = saved
    data = json.loads(file.read_text())
    file.write_text(json.dumps(in_older_form(data, file.parent, 2)))
    assert smp.resume_from_checkpoint(str(tmp_path)) == 1
    with open(file.parent / "model_0.pt", "r+b") as damaged:
        damaged.seek(-1, 2)
        damaged.write(b"x")
    with pytest.raises(CheckpointError, match="model_0.pt has other content than was saved"):
        smp.resume_from_checkpoint(str(tmp_path))


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p["exp_avg"].update({"0.weighu": p["exp_avg"].pop("0.weight")}), "of 0.weighu, which is no tensor"),
        (lambda p: p.update({"exp_avh": p.pop("exp_avg")}), "the state 'exp_avh', which the optimizer does not have"),
        (
            lambda p: p["exp_avg"].pop("0.weight"),
            "has the state 'exp_avg' of 0.weight, of which its manifest does not know",
        ),
        (
            lambda p: p["exp_avg"].update({"0.weight": [None, None, 0, 8]}),
            r"'exp_avg' of 0.weight lacks elements 8 to 9 of 9",
        ),
    ],
)
def test_resuming_checks_that_all_pieces_are_there(saved, tmp_path, form, change, said):
    _, optimizer, file = saved
    data = json.loads(file.read_text())
    change(data["pieces"]["optimizer_0.pt"])
    data = in_older_form(data, file.parent, form)  # by a stranger who knows the form
    if form == 1:
        del data["digest"]
    file.write_text(json.dumps(data))
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    with pytest.raises(CheckpointError, match=said):
        smp.resume_from_checkpoint(str(tmp_path))
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(before, optimizer.state.values(), strict=True))


@pytest.mark.parametrize(
    "name", ["../outside.pt", "/etc/passwd", "..", "a/../b", "a\\b", "a\0b", "\ud800", "", "x" * 256]
)
def test_a_name_that_leads_elsewhere_is_refused(saved, tmp_path, name):
    _, _, file = saved
    assert not is_plain_name(name)
    data = json.loads(file.read_text())
    data["files"][name] = data["files"].pop("user_content.pt")
    data["digest"] = digest_of(data)
    file.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="files cannot be"):
        smp.resume_from_checkpoint(str(tmp_path))


def test_a_file_that_is_a_link_is_not_followed(saved, tmp_path):
    file = saved[2].with_name("model_0.pt")
    (tmp_path / "elsewhere.pt").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CheckpointError, match=r"model_0.pt is a link, where a checkpoint has a file"):
        smp.resume_from_checkpoint(str(tmp_path))


def _pipe(path):
    import os

    os.mkfifo(path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_pipe, "a named pipe"),
        (lambda path: path.mkdir(), "a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "a link"),
    ],
)
@pytest.mark.parametrize("name", ["manifest.json", "model_0.pt", "user_content.pt"])
def test_what_is_no_file_is_refused_at_once_and_named(saved, tmp_path, make, kind, name):
    file = saved[2].with_name(name)
    file.unlink()
    make(file)
    with pytest.raises(CheckpointError, match=f"{name} is {kind}, where a checkpoint has a file"):
        smp.resume_from_checkpoint(str(tmp_path))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_pipe, "is a named pipe|there is no checkpoint file"),
        (lambda path: path.mkdir(), "is a folder|there is no checkpoint file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device|there is no checkpoint file"),
    ],
)
@pytest.mark.parametrize("name", ["w", "w_optimizer", "user_content_w"])
def test_what_is_no_file_of_a_full_checkpoint_is_refused_at_once(saved, tmp_path, make, said, name):
    smp.save_checkpoint(str(tmp_path), tag="w", partial=False)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=said):
        smp.resume_from_checkpoint(str(tmp_path), tag="w", partial=False)


def test_more_elements_than_the_file_can_have_are_refused_before_there_is_room_made_for_them(saved, tmp_path):
    _, _, file = saved
    data = json.loads(file.read_text())
    data["parameters"]["0.weight"]["shape"] = [2**20, 2**20]
    data["digest"] = digest_of(data)
    file.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"model_0.pt is said to have [\d,]+ elements in [\d,]+ bytes"):
        smp.resume_from_checkpoint(str(tmp_path))


def test_what_scripts_do_to_the_manifest_of_another_release_is_named(saved, tmp_path):
    """Every value, one after the other, is of a type that it cannot be."""
    file = saved[2]
    data = json.loads(file.read_text())
    tried = 0
    for key in data:
        for wrong in ({"a": [1]}, [[]], "x", -1.5, None):
            if type(wrong) is type(data[key]) or key == "has_content":
                continue
            if wrong is None and key in ("optimizer", "save"):
                continue
            changed = {**data, key: wrong, "format": data["format"] if key != "format" else wrong}
            changed["digest"] = digest_of(changed) if key != "digest" else wrong
            with pytest.raises(ValueError, match="."):
                Manifest.from_json(json.dumps(changed))
            tried += 1
    assert tried > 40


@pytest.mark.parametrize("tag", ["newest", "manifest.json", "", "a/b", ".hidden", "a\nb", "x" * 151, "\ud800", ".."])
def test_tags_that_are_no_tags_are_refused(saved, tmp_path, tag):
    for partial in (True, False):
        with pytest.raises(SMPUserError, match="the tag"):
            smp.save_checkpoint(str(tmp_path), tag=tag, partial=partial)


@pytest.mark.parametrize(
    "tag", ["a_partial", "w_optimizer", "user_content_w", "config.json", "w.index.json", ".smp-saving"]
)
def test_tags_that_are_other_files_of_full_checkpoints_are_refused(saved, tmp_path, tag):
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(SMPUserError, match="the tag is"):
        smp.save_checkpoint(str(tmp_path), tag=tag, partial=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_changed_newest_is_not_silent(saved, tmp_path, caplog):
    import logging

    smp.save_checkpoint(str(tmp_path), tag="b", user_content=2)
    (tmp_path / "newest").write_text("a_partial")
    logging.getLogger("smp").propagate = True
    with caplog.at_level(logging.WARNING, logger="smp"):
        assert smp.resume_from_checkpoint(str(tmp_path)) == 1
    assert "which the file newest names, though b_partial was saved later" in caplog.text
    (tmp_path / "newest").write_text("../a_partial")
    assert smp.resume_from_checkpoint(str(tmp_path)) == 2


def test_a_folder_full_of_checkpoints_keeps_no_files_open(saved, tmp_path):
    import os

    for found in checkpoints_in(tmp_path):
        assert found.is_whole
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        checkpoints_in(tmp_path)
        smp.resume_from_checkpoint(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) <= before
