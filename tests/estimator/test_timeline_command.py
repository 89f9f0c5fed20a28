"""``smp-estimator timeline``: synthetic recordings with known idle times, and everything that can be wrong with files."""

from __future__ import annotations

import builtins
import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from smp_config import ConfigError
from smp_estimator.cli.main import main
from smp_estimator.figures.colours import colour_of
from smp_estimator.figures.matplotlib_figure import DARK
from smp_estimator.timeline import JobTimeline, read_timeline
from smp_estimator.timeline.views import chrome_trace, rank_table
from smp_records.timeline import RankTimeline, StepTimeline, parse_timeline, steps_to_keep

MS = 1e-3


def gpipe(stage: int, stages: int, microbatches: int, begin: float) -> list[tuple[str, int, float, float]]:
    """All forwards, then all backwards, 10 ms each: the closed form holds exactly."""
    done = (microbatches + stages - 1) * 10 * MS
    actions = [("F", m, begin + (stage + m) * 10 * MS) for m in range(microbatches)]
    actions += [("B", m, begin + done + (stages - 1 - stage + m) * 10 * MS) for m in range(microbatches)]
    return [(kind, m, start, start + 10 * MS) for kind, m, start in actions]


def rank_file(
    rank: int,
    *,
    stages: int = 4,
    microbatches: int = 4,
    steps: range = range(5, 8),
    clock: float = 0.0,
    **about: Any,
) -> RankTimeline:
    """What one rank of a perfect pipeline would record; its own clock is ``clock`` seconds behind rank 0's."""
    recorded = []
    for number in steps:
        begin = 1000.0 + number - clock
        actions = gpipe(rank % stages, stages, microbatches, begin)
        recorded.append(
            StepTimeline(
                number=number,
                start=begin - 1 * MS,
                stop=begin + 1,
                actions=[(m, kind, m, 0, start, stop) for kind, m, start, stop in actions],
            )
        )
    given: dict[str, Any] = {"job": "job-1", "world_size": stages, "host": "algo-1", "offset": clock, **about}
    names = [f"block {m}" for m in range(microbatches)]
    return RankTimeline(rank=rank, stage=rank % stages, names=names, paths=["layers.0"], steps=recorded, **given)


def put(folder: Path, *files: RankTimeline) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file.file_name).write_text(file.model_dump_json())
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Four stages, four microbatches, three steps; idle 3/7 by the closed form."""
    return put(tmp_path / "job" / "data", *(rank_file(rank) for rank in range(4)))


def call(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["timeline", *map(str, arguments)])
    assert result.exit_code == code, result.output + repr(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return " ".join(result.output.split())


# -- measuring -----------------------------------------------------------------------------------------------


def test_a_perfect_pipeline_has_the_idle_fraction_of_the_closed_form(job: Path) -> None:
    timeline = read_timeline(str(job))
    assert [step.number for step in timeline.steps] == [5, 6, 7]
    for step in timeline.steps:
        assert (step.stages, step.microbatches) == (4, 4)
        assert step.makespan == pytest.approx(2 * 7 * 10 * MS)
        assert step.expected_idle == pytest.approx(3 / 7)
        assert step.idle == pytest.approx(3 / 7)
        assert [step.idle_of(rank) for rank in step.ranks] == pytest.approx([3 / 7] * 4)
        assert [rank.busy_seconds("F") for rank in step.ranks] == pytest.approx([40 * MS] * 4)


def test_clocks_of_hosts_are_brought_together(tmp_path: Path) -> None:
    files = [rank_file(rank, clock=rank * 3600.0) for rank in range(4)]
    timeline = read_timeline(str(put(tmp_path, *files)))
    assert timeline.step().makespan == pytest.approx(140 * MS)
    assert timeline.step().idle == pytest.approx(3 / 7, abs=1e-6)


def test_pipelines_beside_each_other_are_measured_by_themselves(tmp_path: Path) -> None:
    """The second replica runs 50 ms later; that is not idle time of either."""
    files = [rank_file(rank, replica=rank // 2, stages=2, world_size=4, clock=0.05 * (rank // 2)) for rank in range(4)]
    files = [file.model_copy(update={"offset": 0.0}) for file in files]
    step = read_timeline(str(put(tmp_path, *files))).step()
    assert step.stages == 2
    assert step.makespan == pytest.approx(100 * MS)
    assert step.window[1] - step.window[0] == pytest.approx(150 * MS)
    assert [step.idle_of(rank) for rank in step.ranks] == pytest.approx([1 / 5] * 4)


def test_blocks_that_overlap_count_once() -> None:
    step = StepTimeline(
        number=1,
        start=0,
        stop=1,
        actions=[(0, "F", 0, 0, 0.0, 0.5), (0, "S", 0, 0, 0.1, 0.2), (0, "B", 0, 0, 0.4, 0.8)],
    )
    other = StepTimeline(number=1, start=0, stop=1, actions=[(0, "F", 0, 0, 0.9, 1.0)])
    files = [
        ("a", RankTimeline(job="j", rank=0, stage=0, names=["n"], paths=["p"], steps=[step])),
        ("b", RankTimeline(job="j", rank=1, stage=1, names=["n"], paths=["p"], steps=[other])),
    ]
    first, second = JobTimeline.of(files).step().ranks
    assert first.busy_seconds() == pytest.approx(0.8)
    assert first.busy_seconds("B") == pytest.approx(0.4)
    assert JobTimeline.of(files).step().idle_of(second) == pytest.approx(0.9)


def test_gradients_of_weights_are_work_and_have_a_column_of_their_own(tmp_path: Path) -> None:
    step = StepTimeline(
        number=1,
        start=0,
        stop=1,
        actions=[(0, "F", 0, 0, 0.0, 0.2), (0, "B", 0, 0, 0.2, 0.4), (0, "W", 0, 0, 0.7, 1.0)],
    )
    file = RankTimeline(job="j", rank=0, stage=0, world_size=1, names=["n"], paths=["p"], steps=[step])
    found = JobTimeline.of([("a", file)]).step()
    assert found.ranks[0].busy_seconds() == pytest.approx(0.7)
    assert found.idle == pytest.approx(0.3)
    assert "weights" in call(put(tmp_path, file))


def test_only_steps_of_all_ranks_count_and_a_rank_without_work_is_idle(tmp_path: Path) -> None:
    nothing = RankTimeline(
        job="job-1", rank=4, stage=4, names=[], paths=[], steps=[StepTimeline(number=6, start=0, stop=1, actions=[])]
    )
    files = [rank_file(0, steps=range(3, 7)), *(rank_file(rank) for rank in range(1, 4)), nothing]
    timeline = read_timeline(str(put(tmp_path, *files)))
    assert [step.number for step in timeline.steps] == [6]
    assert timeline.step().idle_of(timeline.step().ranks[4]) == 1.0


# -- the command ---------------------------------------------------------------------------------------------


def test_it_prints_tables_and_writes_trace_and_picture(job: Path, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "step.png"
    said = call(job, "--trace", trace, "--picture", picture)
    assert "3 steps of job-1" in said
    assert "step 6: 42.9% idle; (p − 1)/(m + p − 1) = 42.9% for 4 equal stages and 4 microbatches" in said
    assert "step 6 is the median of 3 training steps; the newest is step 7: --step 7" in said
    assert said.count("140.0") == 4  # a row per step, and the title of the one in the middle
    assert said.count("57.1%") == 4  # busy, a row per rank
    assert "warning" not in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    from matplotlib.image import imread

    pixels = imread(picture)[..., :3]
    shares = {}
    for kind, microbatch in itertools.product("FB", range(4)):  # each block takes its share of the picture
        colour = [int(colour_of(kind, microbatch)[at : at + 2], 16) for at in (1, 3, 5)]
        shares[kind, microbatch] = float((abs(pixels * 255 - colour).max(axis=-1) < 3).mean())
    assert min(shares.values()) > 0.01, shares
    assert len({colour_of(kind, number) for kind in "FB" for number in range(64)}) == 128
    assert {event["args"]["step"] for event in json.loads(trace.read_text())["traceEvents"] if "cname" in event} == {
        5,
        6,
        7,
    }


@pytest.mark.parametrize(
    ("makespans", "shown"), [([0.2, 9.0, 0.3], 3), ([0.3, 0.2, 9.0], 1), ([0.3, 0.2, 9.0, 8.0], 1), ([0.5], 1)]
)
def test_the_step_of_median_makespan_is_the_one_that_is_shown(makespans: list[float], shown: int) -> None:
    """Neither the newest nor a step in which something else held the job up."""
    steps = [
        StepTimeline(number=n, start=0, stop=10, actions=[(0, "F", 0, 0, 0, 0.1), (0, "B", 0, 0, 0.1, length)])
        for n, length in enumerate(makespans, 1)
    ]
    timeline = JobTimeline.of([("a", RankTimeline(job="j", rank=0, stage=0, names=["n"], paths=["p"], steps=steps))])
    assert timeline.step().number == shown


def test_title_and_table_agree() -> None:
    action = StepTimeline(number=3, start=0, stop=2, actions=[(0, "B", 0, 0, 0.0, 1.29876)])
    step = JobTimeline.of(
        [("a", RankTimeline(job="j", rank=0, stage=0, names=["n"], paths=["p"], steps=[action]))]
    ).step()
    assert step.headline.startswith("step 3: 1298.8 ms, ")
    assert rank_table(step).title == "step 3, 1298.8 ms"


def test_a_notebook_shows_the_step_as_a_picture(job: Path) -> None:
    from xml.etree import ElementTree

    timeline = read_timeline(str(job))
    step = timeline.step()
    assert timeline._repr_html_() == step._repr_html_()
    picture = ElementTree.fromstring(step._repr_html_())
    space = "{http://www.w3.org/2000/svg}"
    bars = picture.findall(f"{space}rect")
    assert len(bars) == sum(len(rank.blocks) for rank in step.ranks)
    said = [text.text or "" for text in picture.iter(f"{space}text")]
    assert step.headline in said
    assert [text for text in said if text.startswith("rank 0 ")]
    # Lanes are as wide as the step: its first block begins at their left edge, its last ends at the right one.
    edges = [(float(bar.attrib["x"]), float(bar.attrib["x"]) + float(bar.attrib["width"])) for bar in bars]
    assert min(left for left, _ in edges) == pytest.approx(130, abs=0.01)
    assert max(right for _, right in edges) == pytest.approx(952, abs=0.01)
    assert picture.attrib["fill"] == "currentColor", "readable on light and on dark ground"


def test_one_step(job: Path, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "step.svg"
    said = call(job, "--step", 6, "--trace", trace, "--picture", picture, "--dark")
    assert "step 6, 140.0 ms" in said
    assert "3 steps" not in said
    assert {event["args"]["step"] for event in json.loads(trace.read_text())["traceEvents"] if "cname" in event} == {6}
    assert DARK.background in picture.read_text()


def test_the_trace_is_what_chrome_and_perfetto_read(job: Path) -> None:
    trace = chrome_trace(read_timeline(str(job)))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    events = trace["traceEvents"]
    assert json.loads(json.dumps(trace)) == trace
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank} (stage {rank}, algo-1)" for rank in range(4)}
    whole = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in whole)
    blocks = [event for event in whole if event["cat"] != "step"]
    assert len(blocks) == 3 * 4 * 8
    assert {event["cat"] for event in blocks} == {"forward", "backward"}
    first = min((event for event in blocks if event["pid"] == 2), key=lambda event: event["ts"])
    assert first["ts"] == pytest.approx(21_000)  # the call began 1 ms earlier, two stages before took 10 ms each
    assert first["dur"] == pytest.approx(10_000)
    assert first["args"] == {"microbatch": 0, "module": "layers.0", "step": 5}
    assert [event["name"] for event in whole if event["cat"] == "step" and event["pid"] == 0] == [
        "step 5",
        "step 6",
        "step 7",
    ]


@pytest.mark.parametrize("where", ["archive", "folder", "uri", "file"])
def test_it_finds_the_files_in_what_a_job_left(job: Path, tmp_path: Path, where: str) -> None:
    left = tmp_path / "left"
    left.mkdir()
    with tarfile.open(left / "output.tar.gz", "w:gz") as archive:
        archive.add(job, arcname="data")
    (left / "model.tar.gz").write_bytes((left / "output.tar.gz").read_bytes()[:0] or _empty_archive())
    given = {
        "archive": left / "output.tar.gz",
        "folder": left,
        "uri": left.as_uri(),
        "file": job / "timeline-rank2.json",
    }
    timeline = read_timeline(str(given[where]))
    assert timeline.ranks == ((2,) if where == "file" else (0, 1, 2, 3))


def _empty_archive() -> bytes:
    import io

    raw = io.BytesIO()
    tarfile.open(fileobj=raw, mode="w:gz").close()
    return raw.getvalue()


def test_many_ranks_are_summed_up(tmp_path: Path) -> None:
    put(tmp_path, *(rank_file(rank, stages=12) for rank in range(12)))
    said = call(tmp_path)
    assert "least idle" in said or ("least" in said and "most" in said)
    assert "rank 11 idle" not in said


# -- what can be wrong ---------------------------------------------------------------------------------------


def test_nothing_recorded_says_how_to_switch_it_on(tmp_path: Path) -> None:
    said = call(tmp_path, code=1)
    assert 'environment={"SMP_TIMELINE": "10"}' in said
    assert "does not exist" in call(tmp_path / "none", code=1)
    assert "aws s3 cp s3://bucket/job ." in call("s3://bucket/job", code=1)


def test_files_of_different_jobs(tmp_path: Path) -> None:
    put(tmp_path, rank_file(0), rank_file(1, job="job-2"))
    said = call(tmp_path, code=1)
    assert "of different jobs" in said
    assert "'job-1'" in said
    assert "'job-2'" in said
    assert "timeline-rank1.json" in said


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    put(tmp_path / "a", rank_file(0))
    put(tmp_path / "b", rank_file(0))
    assert "rank 0 has two timelines" in call(tmp_path, code=1)


def test_steps_that_no_two_ranks_share(tmp_path: Path) -> None:
    put(tmp_path, rank_file(0, steps=range(1, 4)), rank_file(1, steps=range(4, 6)))
    assert "rank 0: 1–3; rank 1: 4–5" in call(tmp_path, code=1)


def test_a_step_that_was_not_kept(job: Path) -> None:
    assert "step 9 was not recorded by every rank; the job kept steps 5–7" in call(job, "--step", 9, code=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: len(text) // 2], "may have been cut"),
        (lambda text: "[]", "is no timeline of a rank"),
        (lambda text: text.replace('"F"', '"X"'), "is no timeline of a rank"),
        (lambda text: text.replace('"paths":["layers.0"]', '"paths":[]'), "refers to a name"),
        (lambda text: text.replace('"version":1', '"version":2'), "has format 2"),
        (lambda text: "\x00\xff", "is no timeline of a rank"),
    ],
)
def test_broken_files(job: Path, change: Any, said: str) -> None:
    file = job / "timeline-rank1.json"
    file.write_text(change(file.read_text()))
    found = call(job, code=1)
    assert said in found
    assert "timeline-rank1.json" in found


def test_a_broken_archive(tmp_path: Path) -> None:
    (tmp_path / "output.tar.gz").write_bytes(b"no archive")
    assert "is no readable archive" in call(tmp_path / "output.tar.gz", code=1)


def test_ranks_whose_files_are_missing_and_clocks_that_are_not_known(tmp_path: Path) -> None:
    put(tmp_path, *(rank_file(rank, offset_error=0.02) for rank in (0, 2, 3)))
    said = call(tmp_path)
    assert "no file of rank 1" in said
    assert "±20 ms" in said


def test_without_matplotlib(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    said = call(job, "--picture", tmp_path / "p.png", code=1)
    assert "pip install matplotlib" in said


def test_files_that_cannot_be_written(job: Path, tmp_path: Path) -> None:
    assert "cannot be written" in call(job, "--trace", tmp_path / "none" / "trace.json", code=1)
    assert "cannot be written" in call(job, "--picture", tmp_path / "none" / "picture.png", code=1)
    assert "use .png, .svg or .pdf" in call(job, "--picture", tmp_path / "picture.docx", code=1)


# -- the switch ----------------------------------------------------------------------------------------------


def test_the_switch() -> None:
    assert steps_to_keep({}) == steps_to_keep({"SMP_TIMELINE": ""}) == steps_to_keep({"SMP_TIMELINE": "0"}) == 0
    assert steps_to_keep({"SMP_TIMELINE": " 25 "}) == 25
    for wrong in ("on", "-1", "1.5", "²"):
        with pytest.raises(ConfigError, match="set it to a whole number such as 10"):
            steps_to_keep({"SMP_TIMELINE": wrong})


def test_the_estimator_refuses_a_switch_that_ranks_would_refuse(make: Any) -> None:
    with pytest.raises(ConfigError, match="SMP_TIMELINE is 'yes'"):
        make(environment={"SMP_TIMELINE": "yes"})
    make(environment={"SMP_TIMELINE": "10"})


def test_files_are_read_as_they_were_written() -> None:
    file = rank_file(3, host="algo-2", offset=-1.25, offset_error=2e-4)
    assert parse_timeline(file.model_dump_json(), "here") == file
