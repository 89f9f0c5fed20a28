"""What is copied to a job and from it: links that lead anywhere, pipes, and files that cannot be read."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smp_config import ConfigError
from smp_estimator.local.files import artifacts, tree
from smp_estimator.local.files.code import CodeSource


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Two folders that link to each other, a way out, a way to nowhere, and a pipe."""
    source, outside = tmp_path / "source", tmp_path / "outside"
    for folder in (source / "a", source / "b", outside):
        folder.mkdir(parents=True)
    (source / "train.py").write_text("")
    (source / "a" / "self").symlink_to(source)
    (source / "a" / "to_b").symlink_to(source / "b")
    (source / "b" / "to_a").symlink_to(source / "a")
    (outside / "data.txt").write_text("1")
    (outside / "back").symlink_to(source)
    (source / "outside").symlink_to(outside)
    (source / "gone").symlink_to("nowhere")
    (source / "root").symlink_to("/")
    os.mkfifo(source / "pipe")
    return source


def test_code_with_odd_links(odd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "job" / "code"
    target.parent.mkdir()
    CodeSource("train.py", str(odd)).copy_to(target, None)
    assert names(target) == ["a", "a/to_b", "b", "b/to_a", "outside", "outside/data.txt", "train.py"]
    assert "pipe is neither a file nor a directory" in caplog.text
    assert "a/self leads back to" in caplog.text
    assert "gone points to nothing" in caplog.text


def test_code_that_cannot_be_copied(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is played."""

    def refuse(source: str, target: str, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", source)

    refusing = SimpleNamespace(copytree=functools.partial(shutil.copytree, copy_function=refuse))
    monkeypatch.setattr(tree, "shutil", refusing)
    with pytest.raises(ConfigError, match=r"source/\S+ \(and \d more\) could not be copied: .*Permission denied"):
        CodeSource("train.py", str(odd)).copy_to(tmp_path / "job" / "code", None)


def test_a_plain_model_leaves_out_what_pack_leaves_out(
    odd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (odd / "latest").symlink_to(odd.parent / "outside")
    place = tmp_path / "out"
    artifacts.deliver([odd], "model", f"file://{place}", "job", None, compressed=False)
    assert {"train.py", "latest/data.txt"} <= set(names(place / "model"))
    assert not {"gone", "pipe", "root"} & set(names(place / "model"))
    assert "gone points to nothing" in caplog.text


def test_nothing_partial_is_left(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", full)
    place = tmp_path / "out"
    with pytest.raises(OSError, match="No space"):
        artifacts.deliver([odd], "model", f"file://{place}", "job", None, compressed=False)
    assert list(place.iterdir()) == []


def test_a_link_to_the_folder_around_it(tmp_path: Path) -> None:
    (tmp_path / "up").symlink_to("..")
    assert tree.is_left_out(tmp_path / "up")
