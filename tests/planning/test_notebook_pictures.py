"""Pictures that notebooks show by themselves: whole SVG, in the page's own colours, with what they are to say."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from smp_config import ConfigError, Group, Topology
from smp_estimator.figures.partition import Partition, read_partition
from smp_estimator.figures.placement import Placement
from smp_estimator.figures.svg import COLOURS, ink_on, shorten
from smp_estimator.planning import plan
from smp_estimator.rehearsal.result import Rehearsed
from smp_estimator.timeline.memory import MemoryCurve
from smp_estimator.timeline.memory_figure import memory_areas
from smp_records.rehearsal import KindReport, MemoryOverTime, ModuleWork, Rehearsal, RehearsalRequest

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture: str) -> ElementTree.Element:
    """The picture, read; its texts have no colour that one ground would hide."""
    tree = ElementTree.fromstring(picture)
    assert tree.get("fill") == "currentColor"
    assert {text.get("fill") for text in tree.iter(f"{SVG}text")} <= {"currentColor", "#fff", "#000"}
    return tree


def boxes(tree: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """Rectangles by what is shown when a pointer rests on them."""
    return {rect.findtext(f"{SVG}title"): rect for rect in tree.iter(f"{SVG}rect") if rect.findtext(f"{SVG}title")}


def words(tree: ElementTree.Element) -> str:
    return " ".join(text.text or "" for text in tree.iter(f"{SVG}text"))


# -- ranks on hosts ------------------------------------------------------------------------------------------


def test_each_rank_has_its_place_and_its_part() -> None:
    tree = drawn(Placement(Topology(16, pipeline=2, tensor=2, sharded=2), 8)._repr_html_())
    found = boxes(tree)
    assert len(found) == 16
    by_rank = {int(re.match(r"rank (\d+):", tip)[1]): (tip, rect) for tip, rect in found.items()}
    topology = Topology(16, pipeline=2, tensor=2, sharded=2)
    for rank, (tip, rect) in by_rank.items():
        at = topology.coordinates(rank)
        assert f"stage {at.pp}, tensor rank {at.tp}, part {at.rdp % 2}, replica {at.rdp // 2}" in tip
        assert rect.get("fill") == COLOURS[at.pp]
    rows = {rect.get("y") for _, (_, rect) in by_rank.items()}
    assert len(rows) == 2, "a row for each host"
    members = ", ".join(map(str, topology.group_of(Group.PP, 0)))
    assert f"; pipeline group {members};" in by_rank[0][0]
    assert "16 ranks on 2 nodes" in words(tree)


def test_many_hosts_are_told_in_words() -> None:
    tree = drawn(Placement(Topology(1024, sharded=8), 8)._repr_html_())
    assert len(boxes(tree)) == 64
    assert "120 more hosts of the same kind" in words(tree)


def test_a_plan_shows_its_ranks() -> None:
    of_one = plan("gpt2", "ml.g5.xlarge")
    assert "<svg" not in of_one._repr_html_()
    of_eight = plan("gpt2", "ml.p4d.24xlarge", 1, {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    assert "8 ranks on 1 node: pipeline of 2 stages" in of_eight._repr_html_()


# -- the partition -------------------------------------------------------------------------------------------

MODULES = {"": 0, "enter": 0, "blocks": 0, "blocks.0": 0, "blocks.1": 1, "blocks.1.up": 1, "leave": 1}


def test_modules_are_as_high_as_their_part() -> None:
    shares = {"enter": 1.0, "blocks.0": 4.0, "blocks.1.up": 3.0, "leave": 2.0}
    found = boxes(drawn(Partition(2, MODULES, shares, "time")._repr_html_()))
    height = {tip.partition(":")[0]: float(rect.get("height")) + 1.5 for tip, rect in found.items()}
    assert height["blocks"] == pytest.approx(0.7 * height["model"], abs=0.2)
    assert height["blocks.0"] == pytest.approx(0.4 * height["model"], abs=0.2)
    fills = {tip.partition(":")[0]: rect.get("fill") for tip, rect in found.items()}
    assert fills["blocks.0"] == fills["enter"] == COLOURS[0]
    assert fills["blocks.1"] == fills["leave"] == COLOURS[1]
    assert fills["blocks"] not in COLOURS
    assert "blocks: stages 0, 1, 70.0%" in found


def test_where_the_stage_changes_it_is_shown_whatever_the_room() -> None:
    deep = {"": 0, **{f"blocks.{n}": int(n >= 150) for n in range(200)}}
    found = boxes(drawn(Partition(2, deep)._repr_html_()))
    stages = {tip.partition(": ")[2] for tip in found if tip.startswith("blocks.")}
    assert stages == {"stage 0", "stage 1"}


def test_a_partition_that_a_job_wrote_is_read(tmp_path) -> None:
    file = tmp_path / "partition.json"
    file.write_text(json.dumps({"format": 1, "stages": 2, "modules": MODULES}))
    shown = read_partition(file)
    assert (shown.stages, shown.modules) == (2, MODULES)
    assert "7 modules on 2 stages" in shown._repr_html_()


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"stages": 2, "modules": {"": 2}}', '{"stages": 2, "modules": 3}'])
def test_what_is_no_partition_is_refused(tmp_path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match="no partition that a job wrote"):
        read_partition(tmp_path / "p.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_partition(tmp_path / "absent.json")


# -- memory --------------------------------------------------------------------------------------------------


def test_areas_end_at_their_bytes() -> None:
    curve = MemoryCurve("stage 0", [0.0, 1.0, 2.0], {"parameter": [4, 4, 4], "activation": [0, 8, 2]}, 24)
    tree = drawn(memory_areas("Memory", [curve]))
    parameter, activation = (
        [tuple(map(float, point.split(","))) for point in shape.get("points").split()]
        for shape in tree.iter(f"{SVG}polygon")
    )
    lowest = max(y for _, y in parameter)
    tallest = lowest - min(y for _, y in activation)
    assert lowest - min(y for _, y in parameter) == pytest.approx(tallest * 4 / 12, abs=0.1)
    assert "50% of 0 GiB" in words(tree)


def test_only_the_highest_are_drawn() -> None:
    curves = [MemoryCurve(f"stage {n}", [0.0, 1.0], {"parameter": [n + 1, n + 1]}) for n in range(11)]
    said = words(drawn(memory_areas("Memory", curves)))
    assert "stage 10" in said
    assert "stage 0 " not in said
    assert "3 more with lower peaks are left out" in said


def _kind(stage: int, modules: dict[str, float]) -> KindReport:
    work = [
        ModuleWork(module=name, phase="forward", dtype="float32", calls=1, flops=1.0, bytes=1, seconds=seconds)
        for name, seconds in modules.items()
    ]
    curve = MemoryOverTime(seconds=[0.0, 1.0], owners={"parameter": [1 << 30, 1 << 30], "other": [5, 5]})
    numbers = dict.fromkeys(("rank", "parameters", "resident_bytes", "first_step_peak_bytes", "peak_bytes"), 1)
    return KindReport(
        stage=stage,
        stands_for=4,
        steps=3,
        peak_phase="forward",
        peak_module="blocks.0",
        peak_line="",
        classes={},
        holders=[],
        curve=curve,
        collectives=[],
        links=[],
        work=work,
        step_seconds=1.0,
        **numbers,
    )


def test_a_rehearsal_shows_memory_and_partition() -> None:
    kinds = [_kind(0, {"": 9.0, "blocks.0": 2.0, "blocks.1": 0.1}), _kind(1, {"blocks.1": 2.0})]
    rehearsal = Rehearsal(
        request=RehearsalRequest(hosts=1, ranks_per_host=8, folder=""), mp_parameters={}, kinds=kinds, seconds=1.0
    )
    shown = Rehearsed(rehearsal, 2 << 30)._repr_html_()
    memory, partition = (drawn(f"<svg{part}".partition("</svg>")[0] + "</svg>") for part in shown.split("<svg")[1:])
    assert "stage 1, as 4 ranks, most in forward blocks.0: 50% of 2 GiB" in words(memory)
    assert "other" not in words(memory)
    assert {tip: rect.get("fill") for tip, rect in boxes(partition).items() if "blocks." in tip} == {
        "blocks.0: stage 0, 50.0%": COLOURS[0],
        "blocks.1: stage 1, 50.0%": COLOURS[1],
    }
    alone = Rehearsed(rehearsal.model_copy(update={"kinds": kinds[:1]}), None)._repr_html_()
    assert alone.count("<svg") == 1


def test_names_can_be_read_on_every_colour() -> None:
    assert ink_on("#0072b2") == "#fff"
    assert ink_on("#e69f00") == "#000"
    names = [f"m{n}" for n in range(8)]
    tree = drawn(Partition(8, {name: n for n, name in enumerate(names)})._repr_html_())
    inks = {text.text: text.get("fill") for text in tree.iter(f"{SVG}text")}
    assert [inks[name] for name in names] == [ink_on(colour) for colour in COLOURS]


def test_modules_stand_in_the_order_of_the_model() -> None:
    found = boxes(drawn(Partition(2, MODULES)._repr_html_()))
    top = {tip.partition(":")[0]: float(rect.get("y")) for tip, rect in found.items()}
    assert top["enter"] < top["blocks"] < top["leave"]


def test_names_are_cut_to_their_room() -> None:
    assert shorten("embedding", 100) == "embedding"
    assert shorten("embedding", 40).endswith("…")
    assert shorten("embedding", 10) == ""
