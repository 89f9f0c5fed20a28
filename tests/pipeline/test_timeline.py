"""Recording a step: what is kept, where it goes, and one clock for all ranks."""

from __future__ import annotations

import logging
import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from smp_config import ConfigError
from smp_records.timeline import parse_timeline
from smp_runtime.errors import SMPRuntimeError
from smp_runtime.pipeline.observe.recorder import (
    ClockSample,
    SharedClock,
    TimelineRecorder,
    estimate_offset,
    machine_identity,
    recorder_of_job,
    share_clock,
)


def record(recorder: TimelineRecorder, *numbers: int, actions: int = 3) -> None:
    for number in numbers:
        recorder.begin_step(number)
        for microbatch in range(actions):
            start = time.perf_counter()
            recorder.add(f"F{microbatch} layers.1", "F", microbatch, "layers.1", start, start + 0.01)
        recorder.end_step()


def read(folder: Path, rank: int = 0) -> Any:
    path = folder / f"timeline-rank{rank}.json"
    return parse_timeline(path.read_bytes(), str(path))


# -- what is kept --------------------------------------------------------------------------------------------


def test_what_is_recorded_is_what_is_read(tmp_path: Path) -> None:
    clock = SharedClock("job-1", offset=2.5, error=1e-4)
    recorder = TimelineRecorder(1, 3, clock=clock, replica=1, host="algo-2", world_size=4)
    before = time.perf_counter()
    recorder.begin_step(12)
    recorder.add("F0 layers.1", "F", 0, "layers.1", before, before + 0.25)
    recorder.add("step", "S", 1, "", before + 0.25, before + 0.5)
    recorder.add("B0 layers.1", "B", 0, "layers.1", before + 0.5, before + 0.75)
    recorder.end_step()
    path = recorder.write(tmp_path)
    assert path == tmp_path / "timeline-rank3.json"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "no temporary file is left"
    found = read(tmp_path, 3)
    assert (found.job, found.rank, found.stage, found.replica) == ("job-1", 3, 1, 1)
    assert (found.host, found.world_size, found.offset, found.offset_error) == ("algo-2", 4, 2.5, 1e-4)
    assert found.names == ["F0 layers.1", "step", "B0 layers.1"]
    assert found.paths == ["layers.1", ""]
    (step,) = found.steps
    assert step.number == 12
    assert before <= step.start <= step.stop <= time.perf_counter()
    assert step.actions == [
        (0, "F", 0, 0, before, before + 0.25),
        (1, "S", 1, 1, before + 0.25, before + 0.5),
        (2, "B", 0, 0, before + 0.5, before + 0.75),
    ]


def test_the_words_of_the_schedules_are_the_files(tmp_path: Path) -> None:
    from smp_runtime.pipeline.schedule.actions import TaskKind

    recorder = TimelineRecorder(0, 0)
    recorder.begin_step(1)
    for kind in TaskKind:
        recorder.add("name", kind.value, 0, "", 1.0, 2.0)
        recorder.add("name", kind, 0, "", 1.0, 2.0)  # type: ignore[arg-type]
    recorder.end_step()
    recorder.write(tmp_path)
    assert [action[1] for action in read(tmp_path).steps[0].actions] == ["F", "F", "B", "B", "S", "S", "W", "W"]


def test_a_long_job_does_not_grow() -> None:
    recorder = TimelineRecorder(0, 0, keep=4)
    record(recorder, *range(1000), actions=5)
    assert [step.number for step in recorder.timeline().steps] == [996, 997, 998, 999]
    assert sum(len(step.actions) for step in recorder.timeline().steps) == 20


def test_only_what_is_inside_a_whole_step_is_kept() -> None:
    recorder = TimelineRecorder(0, 0)
    recorder.end_step()
    recorder.add("before", "F", 0, "", 0.0, 1.0)
    recorder.begin_step(1)  # fails
    recorder.add("failed", "F", 0, "", 0.0, 1.0)
    record(recorder, 2)
    recorder.add("after", "B", 0, "", 0.0, 1.0)
    recorder.end_step()
    (step,) = recorder.timeline().steps
    assert step.number == 2
    assert recorder.timeline().names == ["F0 layers.1", "F1 layers.1", "F2 layers.1"]


# -- when it is written --------------------------------------------------------------------------------------


def test_the_first_steps_are_written_when_full_and_the_newest_at_the_end(tmp_path: Path) -> None:
    recorder = TimelineRecorder(0, 0, keep=3, folder=tmp_path / "made" / "for it")
    record(recorder, 1, 2)
    assert not (tmp_path / "made").exists()
    record(recorder, 3)
    assert [step.number for step in read(tmp_path / "made" / "for it").steps] == [1, 2, 3]
    record(recorder, 4, 5)
    assert [step.number for step in read(tmp_path / "made" / "for it").steps] == [1, 2, 3], "a step costs no file"
    recorder.close()
    assert [step.number for step in read(tmp_path / "made" / "for it").steps] == [3, 4, 5]
    (tmp_path / "made" / "for it" / "timeline-rank0.json").unlink()
    recorder.close()
    assert not (tmp_path / "made" / "for it" / "timeline-rank0.json").exists(), "nothing new to write"


def test_a_job_of_fewer_steps_and_one_of_none(tmp_path: Path) -> None:
    TimelineRecorder(0, 7, keep=3, folder=tmp_path).close()
    assert list(tmp_path.iterdir()) == []
    recorder = TimelineRecorder(0, 0, keep=3, folder=tmp_path)
    record(recorder, 1)
    recorder.close()
    assert [step.number for step in read(tmp_path).steps] == [1]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    recorder = TimelineRecorder(0, 5, keep=1, folder=tmp_path / "file")
    with caplog.at_level(logging.WARNING, "smp"):
        logging.getLogger("smp").addHandler(caplog.handler)
        try:
            record(recorder, 1)
            recorder.close()
        finally:
            logging.getLogger("smp").removeHandler(caplog.handler)
    assert any("rank 5: the timeline cannot be written" in message for message in caplog.messages)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TimelineRecorder(0, 0, keep=1, folder=tmp_path)
    record(recorder, 1)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    record(recorder, 2)
    recorder.close()
    assert [step.number for step in read(tmp_path).steps] == [1]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_switch(tmp_path: Path) -> None:
    class Alone:
        rank, size = 0, 1

    def asked(**environ: str) -> Any:
        return recorder_of_job(0, Alone(), environ=environ)  # type: ignore[arg-type]

    assert asked() is asked(SMP_TIMELINE="0") is None
    recorder = asked(SMP_TIMELINE="2", SM_OUTPUT_DATA_DIR=str(tmp_path), SMP_HOST="algo-1")
    record(recorder, 1, 2)
    found = read(tmp_path)
    assert (found.host, found.world_size, len(found.steps)) == ("algo-1", 1, 2)
    assert found.job
    with pytest.raises(ConfigError, match="SMP_TIMELINE is 'on'"):
        asked(SMP_TIMELINE="on")


def test_without_a_folder_nothing_is_written_where_the_script_happens_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Alone:
        rank, size = 0, 1

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("smp"), "propagate", True)
    with caplog.at_level(logging.WARNING, "smp"):
        recorder: Any = recorder_of_job(0, Alone(), environ={"SMP_TIMELINE": "1"})  # type: ignore[arg-type]
    record(recorder, 1, 2)
    recorder.close()
    assert list(tmp_path.iterdir()) == []
    assert "SM_OUTPUT_DATA_DIR is not set" in caplog.text
    assert [step.number for step in recorder.timeline().steps] == [2]


# -- one clock -----------------------------------------------------------------------------------------------


def test_the_offset_is_the_middle_of_the_fastest_round_trip() -> None:
    samples = [
        ClockSample(10.0, 113.0, 14.0),  # slow, and its answer took the longer way
        ClockSample(20.0, 120.6, 21.0),
        ClockSample(30.0, 133.9, 34.0),
    ]
    offset, error = estimate_offset(samples)
    assert offset == pytest.approx(100.1)
    assert error == pytest.approx(0.5)
    assert abs(offset - 100.0) <= error


def test_a_true_offset_is_never_further_away_than_the_error() -> None:
    import random

    chance = random.Random(0)
    for _ in range(500):
        true = chance.uniform(-1e6, 1e6)
        samples = []
        for _ in range(8):
            sent, there, back = chance.uniform(0, 1e3), chance.expovariate(1e3), chance.expovariate(1e3)
            samples.append(ClockSample(sent, sent + there + true, sent + there + back))
        offset, error = estimate_offset(samples)
        assert abs(offset - true) <= error + 1e-9
        assert error == pytest.approx(min(sample.received - sample.sent for sample in samples) / 2)


@pytest.mark.parametrize("samples", [[], [ClockSample(5.0, 1.0, 4.0)]])
def test_clocks_that_cannot_be_compared(samples: list[ClockSample]) -> None:
    with pytest.raises(SMPRuntimeError, match="SMP_TIMELINE=0"):
        estimate_offset(samples)


class Wire:
    """A control plane between threads: messages in order, each received before ``send`` returns."""

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int], queue.Queue[Any]]) -> None:
        self.rank, self.size, self._boxes = rank, size, boxes

    def send(self, payload: Any, dest: int, channel: int = 0) -> None:
        self._boxes[self.rank, dest].put(payload)

    def receive(self, source: int, channel: int = 0) -> Any:
        return self._boxes[source, self.rank].get(timeout=10)


def shared_clocks(machines: list[str], shifts: list[float]) -> list[SharedClock]:
    """What ranks agree on whose clocks are shifted against this one's."""
    size = len(machines)
    boxes: dict[tuple[int, int], queue.Queue[Any]] = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    found: dict[int, SharedClock] = {}

    def rank(number: int) -> None:
        clock = lambda: time.perf_counter() + shifts[number]  # noqa: E731
        found[number] = share_clock(Wire(number, size, boxes), clock=clock, machine=machines[number])  # type: ignore[arg-type]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == list(range(size))
    return [found[number] for number in range(size)]


def test_ranks_agree_on_the_clock_of_rank_0() -> None:
    shifts = [0.0, 500.0, 0.0, -3.0]
    clocks = shared_clocks(["a", "b", "a", "c"], shifts)
    assert len({clock.job for clock in clocks}) == 1
    for clock, shift in zip(clocks, shifts, strict=True):
        assert abs(clock.offset + shift) <= clock.error
    assert [clock.error == 0.0 for clock in clocks] == [True, False, True, False], "one machine has one clock"


def test_a_machine_that_is_not_known_measures() -> None:
    clocks = shared_clocks(["", ""], [0.0, 7.0])
    assert abs(clocks[1].offset + 7.0) <= clocks[1].error


def test_two_runs_of_one_job_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_JOB_NAME", "my-job")
    first, second = shared_clocks(["a"], [0.0]), shared_clocks(["a"], [0.0])
    assert first[0].job.startswith("my-job-")
    assert first[0].job != second[0].job


def _recorded(folder: str, pretend_hosts: bool) -> tuple[float, float]:
    """One step of a rank; gives its clock's offset and error."""
    from smp_runtime.job import session
    from smp_runtime.pipeline.observe import recorder as timeline

    control = session.current_session().control
    truth = timeline.machine_identity
    if pretend_hosts:
        timeline.machine_identity = lambda: f"machine {control.rank}"
    try:
        environ = {"SMP_TIMELINE": "1", "SM_OUTPUT_DATA_DIR": folder}
        recorder = timeline.recorder_of_job(control.rank, control, environ=environ)
    finally:
        timeline.machine_identity = truth
    recorder.begin_step(1)
    recorder.add("F0 layer", "F", 0, "layer", 1.0, 2.0)
    recorder.end_step()
    found = recorder.timeline()
    return found.offset, found.offset_error


@pytest.mark.parametrize("pretend_hosts", [False, True])
def test_real_ranks(ranks: Any, tmp_path: Path, pretend_hosts: bool) -> None:
    results = ranks(_recorded, 2, str(tmp_path), pretend_hosts)
    first, second = read(tmp_path, 0), read(tmp_path, 1)
    assert first.job == second.job != ""
    assert (first.world_size, second.world_size) == (2, 2)
    assert (second.offset, second.offset_error) == results[1]
    # One machine: the true offset is 0, known without measuring, and found within its error with it.
    assert abs(second.offset) <= second.offset_error
    assert (second.offset_error > 0) == pretend_hosts


def _trained() -> list[bool]:
    """Training steps and then evaluations, whose parts take some time each; the root stage is the last."""
    import time

    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.004)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(0.006)
            return gradient

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Slow.apply(self.last(self.first(x)))

    net = Net()
    smp.set_partition(net.first, 0)
    model = smp.DistributedModel(net)

    @smp.step
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        model.backward(loss)
        time.sleep(0.002)
        return loss

    @smp.step
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    replayed = []
    for _ in range(6):
        train(torch.ones(6, 4))
        replayed.append(model.pipeline.replayed)
    with torch.no_grad():
        for _ in range(2):
            evaluate(torch.ones(6, 4))
    return replayed


def test_the_root_stage_shows_what_it_computes_forward_and_backward(ranks: Any, tmp_path: Path) -> None:
    from smp_estimator.timeline import read_timeline

    settings = {"partitions": 2, "microbatches": 3, "auto_partition": False, "default_partition": 1}
    environ = {"SMP_TIMELINE": "8", "SM_OUTPUT_DATA_DIR": str(tmp_path)}
    replayed = ranks(_trained, 2, config=settings, env=environ, timeout=60)
    assert replayed[0][-1], "an order is followed in the end"
    found = read_timeline(str(tmp_path))
    assert [step.number for step in found.steps] == list(range(1, 9))
    assert [step.trains for step in found.steps] == [True] * 6 + [False] * 2
    assert found.step().trains
    for step in found.steps:
        other, root = step.ranks
        assert {block.path for block in other.blocks} == {"first"}
        assert {block.path for block in root.blocks} == {""}
        assert root.busy_seconds() == pytest.approx(sum(block.stop - block.start for block in root.blocks)), (
            "no overlap"
        )
        names = {block.name for block in root.blocks}
        assert root.busy_seconds("F") >= 3 * 0.004
        if not step.trains:
            assert names == {f"F{number} (model)" for number in range(3)}
            continue
        assert root.busy_seconds("B") >= 3 * 0.006
        assert root.busy_seconds("S") >= 3 * 0.002
        assert names == {
            *(f"{kind}{number} (model)" for kind in "FB" for number in range(3)),
            *(f"S{number} step function" for number in range(3)),
        }
        for number in range(3):
            kinds = [block.kind for block in root.blocks if block.microbatch == number]
            assert "".join(sorted(kinds, key="FBS".index)) == "".join(kinds)


def test_the_median_training_step_is_shown_and_evaluations_are_called_so(tmp_path: Path) -> None:
    import json

    from click.testing import CliRunner

    from smp_estimator.cli.main import main

    def said(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["timeline", str(tmp_path), *arguments])
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    recorder = TimelineRecorder(0, 0)
    for number, kinds, seconds in ((1, "FB", 0.3), (2, "FB", 0.2), (3, "FB", 0.1), (4, "F", 0.1), (5, "F", 0.1)):
        recorder.begin_step(number)
        for part, kind in enumerate(kinds):
            start = 10.0 * number + part * seconds
            recorder.add(f"{kind}0 (model)", kind, 0, "", start, start + seconds)  # type: ignore[arg-type]
        recorder.end_step()
    recorder.write(tmp_path)
    text = said("--trace", str(tmp_path / "trace"))
    assert "step 2 is the median of 3 training steps; the newest is step 5 (evaluation): --step 5" in text
    assert (text.count("│ training │"), text.count("│ evaluation │")) == (3, 2)
    assert "step 2: 0.0% idle" in text
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "step"]
    assert names == ["step 1", "step 2", "step 3", "step 4 (evaluation)", "step 5 (evaluation)"]
    assert "step 4 (evaluation): 0.0% idle" in said("--step", "4")
    assert "median" not in said("--step", "4")


def test_this_machine_says_who_it_is() -> None:
    assert machine_identity() == machine_identity()


def test_a_name_is_stored_once() -> None:
    recorder = TimelineRecorder(0, 0, keep=1)
    recorder.begin_step(1)
    for _ in range(1000):
        recorder.add("F0 layer", "F", 0, "layer", 1.0, 2.0)
    recorder.end_step()
    found = recorder.timeline()
    assert len(found.steps[0].actions) == 1000
    assert (found.names, found.paths) == (["F0 layer"], ["layer"])
