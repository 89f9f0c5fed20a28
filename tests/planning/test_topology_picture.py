"""The groups of a topology as text and as a picture."""

from __future__ import annotations

import io
import struct
import sys
from pathlib import Path

import pytest
from rich.console import Console

from smp_config import ConfigError, Group, Topology
from smp_estimator.figures.topology import group_appearance, group_text, picture_title, save_png, shown_groups

EXAMPLE = Topology(32, tensor=4, sharded=4)


def _text(topology: Topology) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(group_text(topology))
    return out.getvalue()


def test_the_published_example_as_text() -> None:
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in _text(EXAMPLE).splitlines() if "│" in line
    }
    assert [rows[f"TPG{n}"] for n in (0, 1, 7)] == ["0, 1, 2, 3", "4, 5, 6, 7", "28, 29, 30, 31"]
    assert rows["SDPG0"] == "0, 4, 8, 12"
    assert rows["SDPG4"] == "16, 20, 24, 28"
    assert rows["RDPG0"] == "0, 4, 8, 12, 16, 20, 24, 28"
    assert rows["REPG0"] == "0, 16"


@pytest.mark.parametrize("group", [Group.TP, Group.SHARD])
def test_replicas_share_a_colour_and_are_filled_differently(group: Group) -> None:
    """The published figures: {TPG0, TPG4}, {TPG1, TPG5}, …, and the same for the sharding groups."""
    looks = [group_appearance(EXAMPLE, group, members) for members in EXAMPLE.groups(group)]
    assert looks == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]


def test_only_groups_that_say_something() -> None:
    assert shown_groups(Topology(4)) == [Group.DP]
    assert shown_groups(Topology(1)) == [Group.DP]
    assert shown_groups(Topology(8, pipeline=2)) == [Group.PP, Group.DP]
    assert shown_groups(EXAMPLE) == [Group.TP, Group.SHARD, Group.RDP, Group.REPLICA]
    assert shown_groups(Topology(8, tensor=2, context=2)) == [Group.TP, Group.CONTEXT, Group.RDP]
    assert "CPG0" in _text(Topology(8, context=2))
    assert "(64 ranks)" in _text(Topology(64))


@pytest.mark.parametrize(
    "topology", [EXAMPLE, Topology(8, pipeline=2, tensor=2, sharded=2, placement="PTD"), Topology(1)]
)
def test_the_picture_is_a_png(topology: Topology, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = save_png(topology, tmp_path / "groups.png")
    head = target.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    assert width > 300
    assert height > 100


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="at most 512"):
        save_png(Topology(1024), tmp_path / "x.png")
    with pytest.raises(ConfigError, match="per_node is 0"):
        save_png(EXAMPLE, tmp_path / "x.png", per_node=0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        save_png(EXAMPLE, tmp_path / "x.png")


@pytest.mark.parametrize(
    ("topology", "title"),
    [
        (EXAMPLE, "32 ranks on 4 nodes: tensor parallel over 4, sharded over 4, 2 replicas of each shard"),
        (Topology(8, pipeline=2), "8 ranks on 1 node: pipeline of 2 stages, 4 replicas of each part"),
        (Topology(12), "12 ranks on 2 nodes: 12 replicas of the model"),
        (Topology(8, sharded=8), "8 ranks on 1 node: sharded over 8, 1 replica of each shard"),
        (
            Topology(8, tensor=2, context=2),
            "8 ranks on 1 node: tensor parallel over 2, sequences shared out over 2, 4 replicas of each part",
        ),
        (Topology(4, context=4), "4 ranks on 1 node: sequences shared out over 4, 4 replicas of the model"),
        (Topology(1), "1 rank on 1 node: 1 replica of the model"),
    ],
)
def test_the_title_is_in_words(topology: Topology, title: str) -> None:
    assert picture_title(topology, 8) == title
