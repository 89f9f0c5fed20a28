"""A folder of many checkpoints: a save opens what it has not seen yet, and removes what it would have removed."""

from __future__ import annotations

import shutil

import pytest

from smp_runtime.checkpoint.files.manifest import MANIFEST, Manifest
from smp_runtime.checkpoint.saving import older_folders as older


def _checkpoint(parent, tag, saved):
    folder = parent / f"{tag}_partial"
    folder.mkdir()
    (folder / MANIFEST).write_text(Manifest(str(tag), saved=float(saved)).to_json())
    return folder


@pytest.fixture
def opened(monkeypatch):
    found = []
    inspect = older.inspect_folder
    monkeypatch.setattr(older, "inspect_folder", lambda folder: found.append(folder.name) or inspect(folder))
    return found


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def _remove_surplus(folder, newest, seen):
    hidden, problems = older.hide(older.find_surplus(folder, 3, newest, seen))
    assert problems == older.remove(hidden) == []


def test_nothing_is_opened_while_there_are_not_too_many(tmp_path, opened):
    for tag in range(5):
        _checkpoint(tmp_path, tag, tag)
    assert older.find_surplus(tmp_path, 5, "4_partial") == []
    assert opened == []
    assert len(_names(tmp_path)) == 5


def test_each_is_opened_once_as_long_as_it_stays_what_it_was(tmp_path, opened):
    seen = older.SeenFolders()
    for tag in range(5):
        _checkpoint(tmp_path, tag, tag)
        _remove_surplus(tmp_path, f"{tag}_partial", seen)
    assert _names(tmp_path) == ["2_partial", "3_partial", "4_partial"]
    assert sorted(opened) == [f"{tag}_partial" for tag in range(5)]
    shutil.rmtree(tmp_path / "2_partial")
    _checkpoint(tmp_path, 2, 9)  # saved anew under the same tag
    _checkpoint(tmp_path, 5, 10)
    _remove_surplus(tmp_path, "5_partial", seen)
    assert _names(tmp_path) == ["2_partial", "4_partial", "5_partial"]
    assert sorted(opened[5:]) == ["2_partial", "5_partial"]
