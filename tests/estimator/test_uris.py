"""Addresses and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_estimator.local.files.uris import address_of, path_of


@pytest.mark.parametrize("name", ["my out", "é", "100%", "50%25", "a%20b", "x#y", "x?y", "new folder/inside"])
def test_as_uri_is_read_back_before_and_after_the_folder_exists(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for _ in range(2):
        assert path_of(path.as_uri()) == path
        assert path_of(address_of(path)) == path
        path.mkdir(parents=True, exist_ok=True)


def test_what_exists_as_it_is_written_wins(tmp_path: Path) -> None:
    literal = tmp_path / "a%20b"
    literal.mkdir()
    assert path_of(f"file://{literal}") == literal
    assert path_of(f"file://{literal}/model.tar.gz") == literal / "model.tar.gz"
    assert path_of(address_of(tmp_path / "a b")) == tmp_path / "a b"


@pytest.mark.parametrize("name", ["100%", "5%zz", "%ff", "[data]", "a;b"])
def test_what_is_no_encoding_stays(tmp_path: Path, name: str) -> None:
    assert path_of(f"file://{tmp_path}/{name}") == tmp_path / name


def test_brackets_are_a_folder_like_any(make) -> None:
    with pytest.raises(ValueError, match=r"channel 'train' is .*\[data\]/x, which does not exist"):
        make().fit({"train": "file://[data]/x"})
