"""PyTorch's profiler over some steps of each rank, and all ranks in one trace on one clock."""

from __future__ import annotations

import copy
import gzip
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.platform.command_line import call

import smdistributed.modelparallel.torch as smp
from smp_config import ConfigError
from smp_estimator.timeline.profiles import merged_trace, read_profiles, timeline_beside
from smp_records.profiling import ABOUT, CLOCK_MARK, file_name
from smp_runtime.job import session as sessions
from smp_tools.tracking.profile import RankProfile, begin_profile


def train(steps: int, model: torch.nn.Module | None = None) -> list[tuple[float, float]]:
    """When each step ran, on this process's clock."""
    wrapped = smp.DistributedModel(model or torch.nn.Linear(64, 64))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = wrapped(x).square().mean()
        wrapped.backward(loss)
        return loss

    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step(torch.ones(8, 64))
        optimizer.step()
        times.append((begin, time.perf_counter()))
    return times


@pytest.fixture
def profiled(solo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, list[tuple[float, float]]]:
    monkeypatch.setenv("SMP_PROFILE", "steps=3-4,memory,shapes")
    monkeypatch.setenv("SM_OUTPUT_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINING_JOB_NAME", "job")
    solo()
    times = train(6)
    assert sessions.current_session().ranks.kept(RankProfile)._running is None
    sessions.shutdown()
    return tmp_path, times


def products(events: list[dict[str, Any]], rank: int) -> list[float]:
    """When products of matrices began, in microseconds."""
    return sorted(e["ts"] for e in events if e.get("name") == "aten::addmm" and e["pid"] == rank)


def test_the_steps_that_were_asked_for_are_recorded_on_the_ranks_clock(profiled: Any) -> None:
    folder, times = profiled
    assert [path.name for path in folder.iterdir()] == ["profile-rank00000.json.gz"]
    (trace,) = read_profiles(str(folder))
    assert trace.about.job.startswith("job-")
    assert (trace.about.rank, trace.about.first, trace.about.last) == (0, 3, 4)
    found = [
        event["ts"] / 1e6 + trace.shift
        for event in trace.events
        if event.get("name") == "aten::addmm" and "dur" in event
    ]
    assert len(found) == 2
    for when, (begin, end) in zip(found, times[2:4], strict=True):
        assert begin - 1e-3 <= when <= end + 1e-3
    assert any(event.get("name") == "[memory]" for event in trace.events)
    assert trace.longest()[1] > 0


def test_ranks_come_together_on_the_first_ones_clock(profiled: Any, tmp_path: Path) -> None:
    """A second rank's profiler and clock read other times for the same moments; its offset brings them together."""
    folder, _ = profiled
    content = json.loads(gzip.decompress((folder / file_name(0)).read_bytes()))
    other = copy.deepcopy(content)
    other[ABOUT].update(rank=1, stage=1, host="algo-2", offset=-5.0, offset_error=0.5)
    other[ABOUT]["marks"] = [(before + 5.0, after + 5.0) for before, after in other[ABOUT]["marks"]]
    for event in other["traceEvents"]:
        if "ts" in event and event.get("ph") != "M":
            event["ts"] += 1e9
    (folder / file_name(1)).write_bytes(gzip.compress(json.dumps(other).encode()))
    said = call("profile", str(folder), "--trace", str(tmp_path / "all.json"))
    assert "algo-2" in said.output
    merged = json.loads((tmp_path / "all.json").read_text())
    events = merged["traceEvents"]
    assert merged["otherData"]["clock_error_seconds"] == pytest.approx(0.5, abs=0.01)
    assert products(events, 1) == pytest.approx(products(events, 0), abs=1.0)
    assert min(event["ts"] for event in events if event.get("ph") == "X") == pytest.approx(0.0, abs=1.0)
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert names[0].startswith("rank 0 (stage 0")
    assert names[1] == "rank 1 (stage 1, algo-2)"
    assert all(name.startswith("rank ") for name in names.values())
    assert len(names) == len(set(names.values()))


def break_it(content: dict[str, Any], how: str) -> Any:
    events = content["traceEvents"]
    mark = next(event for event in events if event.get("name", "").startswith(CLOCK_MARK))
    if how == "no mark":
        events.remove(mark)
    elif how == "clock":
        content[ABOUT]["marks"] = [(1.0, float("inf"))]
    elif how == "time":
        events[-1]["ts"] = "12"
    elif how == "endless":
        events[-1]["dur"] = 1e300
    elif how == "event":
        events.append(["X"])
    elif how == "process":
        events.append({"ph": "X", "pid": {}, "ts": 1})
    elif how == "about":
        content[ABOUT]["rank"] = -1
    elif how == "text":
        return []
    return content


@pytest.mark.parametrize("how", ["no mark", "clock", "time", "endless", "event", "process", "about", "text"])
def test_files_of_another_form_are_refused_by_name(tmp_path: Path, how: str) -> None:
    mark = {"ph": "X", "cat": "user_annotation", "name": f"{CLOCK_MARK}0", "pid": 7, "tid": 7, "ts": 10.0, "dur": 1.0}
    content = {"traceEvents": [mark], ABOUT: {"job": "job", "rank": 0, "stage": 0, "marks": [(1.0, 1.5)]}}
    (tmp_path / file_name(0)).write_bytes(gzip.compress(json.dumps(content).encode()))
    assert len(read_profiles(str(tmp_path))) == 1
    (tmp_path / file_name(0)).write_bytes(gzip.compress(json.dumps(break_it(content, how)).encode()))
    with pytest.raises(ConfigError, match="profile-rank00000.json.gz is no profile of a rank"):
        read_profiles(str(tmp_path))


def test_a_file_that_was_cut_and_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no profile-rank.*SMP_PROFILE=10-12"):
        read_profiles(str(tmp_path))
    (tmp_path / file_name(0)).write_bytes(gzip.compress(b'{"traceEvents": []}')[:20])
    with pytest.raises(ConfigError, match="is no profile of a rank"):
        read_profiles(str(tmp_path))


def test_a_rank_that_is_not_asked_for_is_not_profiled(
    solo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SMP_PROFILE", "1,ranks=1")
    monkeypatch.setenv("SM_OUTPUT_DATA_DIR", str(tmp_path))
    session = solo()
    assert session.ranks.kept(RankProfile) is None


def test_one_that_cannot_be_written_costs_a_warning(
    solo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SMP_PROFILE", "1")
    monkeypatch.setenv("SM_OUTPUT_DATA_DIR", str(tmp_path / "file"))
    solo()
    with caplog.at_level("WARNING", logger="smp"):
        logging.getLogger("smp").addHandler(caplog.handler)
        try:
            train(2)
        finally:
            logging.getLogger("smp").removeHandler(caplog.handler)
    assert "the profile cannot be written" in caplog.text


def _stages(folder: str) -> int:
    session = sessions.current_session()
    environ = {"SMP_PROFILE": "2-3", "SM_OUTPUT_DATA_DIR": folder}
    import os

    os.environ.update(environ)
    try:
        begin_profile(session, environ)
        torch.manual_seed(0)
        train(4, torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)))
        return smp.pp_rank()
    finally:
        for name in environ:
            os.environ.pop(name)


@pytest.mark.full
def test_operations_stand_in_the_blocks_of_the_pipeline_that_made_them(ranks: Any, tmp_path: Path) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
    assert ranks(_stages, 2, str(tmp_path), config=config) == [0, 1]
    timeline, traces = timeline_beside(str(tmp_path)), read_profiles(str(tmp_path))
    assert timeline is not None  # without a switch of its own
    assert [step.number - timeline.steps[0].number for step in timeline.steps] == [0, 1]
    events = merged_trace(traces, timeline)["traceEvents"]
    for rank in (0, 1):
        blocks = [
            (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e["pid"] == rank and e.get("cat") in ("forward", "step function") and "dur" in e
        ]
        found = products(events, rank)
        assert len(found) == 4  # a linear map in each of two microbatches of two steps
        assert all(any(begin - 500 <= when <= end + 500 for begin, end in blocks) for when in found)
