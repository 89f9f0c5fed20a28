"""Points reach trackers on a thread of their own, in order, and what trackers do wrong does not reach the training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest
import torch

from smp_emulation.checked import emulated
from smp_runtime.errors import SMPUserError
from smp_tools.tracking import writer as module
from smp_tools.tracking.points import LaterPoint, MetricPoint, check_values
from smp_tools.tracking.writer import Writer


class Recorded:
    """A tracker that remembers."""

    name = "recorded"

    def __init__(self, fails_at: int | None = None, waits: threading.Event | None = None) -> None:
        self.points: list[MetricPoint] = []
        self.threads: set[str] = set()
        self.flushes = 0
        self.closed: list[bool] = []
        self._fails_at, self._waits = fails_at, waits

    def write(self, points: Sequence[MetricPoint]) -> None:
        self.threads.add(threading.current_thread().name)
        if self._waits is not None:
            self._waits.wait()
        for point in points:
            if point.step == self._fails_at:
                raise OSError(28, "No space left on device")
            self.points.append(point)

    def flush(self) -> None:
        self.flushes += 1

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


def test_points_come_in_order_with_the_values_that_tensors_had() -> None:
    tracker, loss = Recorded(), torch.tensor(0.0)
    writer = Writer([tracker])
    for step in range(50):
        loss.fill_(step / 4)
        writer.put(LaterPoint(step, 1000.0 + step, {"loss": loss, "learning_rate": 0.5}))
    loss.fill_(-1.0)  # the script's own tensor, which it goes on using
    writer.close(failed=False)
    assert [(p.step, p.when, p.values) for p in tracker.points] == [
        (step, 1000.0 + step, {"loss": step / 4, "learning_rate": 0.5}) for step in range(50)
    ]
    assert tracker.threads == {"smp-tracking"}
    assert tracker.flushes >= 1
    assert tracker.closed == [False]


def test_a_tracker_that_fails_is_told_of_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Recorded(fails_at=2), Recorded()
    with caplog.at_level(logging.WARNING, logger="smp"):
        writer = Writer([bad, good])
        for step in range(5):
            writer.put(LaterPoint(step, 0.0, {"loss": float(step)}))
        writer.close(failed=True)
    assert [point.step for point in good.points] == [0, 1, 2, 3, 4]
    assert good.closed == [True]
    assert bad.closed == []
    (told,) = [record.getMessage() for record in caplog.records]
    assert "recorded gets no more points" in told
    assert "No space left on device" in told


def test_one_that_hangs_keeps_neither_the_training_nor_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 3)
    monkeypatch.setattr(module, "_LAST_SECONDS_FAILED", 0.05)
    lets_go = threading.Event()
    tracker = Recorded(waits=lets_go)
    with caplog.at_level(logging.WARNING, logger="smp"):
        writer = Writer([tracker])
        for step in range(20):
            writer.put(LaterPoint(step, 0.0, {"loss": 0.0}))
        writer.close(failed=True)
    lets_go.set()
    text = caplog.text
    assert "have not taken the last points" in text
    assert "points are missing" in text


def test_regular_values_stand_at_the_newest_step() -> None:
    tracker = Recorded()
    writer = Writer([tracker], lambda: {"memory_gib/rank1": 0.5})
    writer.put(LaterPoint(7, 0.0, {"loss": 1.0}))
    writer.close(failed=False)
    assert [(p.step, p.values) for p in tracker.points] == [(7, {"loss": 1.0}), (7, {"memory_gib/rank1": 0.5})]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.5", "accuracy='0.5', a str"),
        (None, "a NoneType"),
        (torch.zeros(2), r"shape \(2,\); a tracker draws one number"),
        (torch.zeros(1, dtype=torch.complex64), "shape"),
        ([1.0], "a list"),
    ],
)
def test_what_is_no_number_is_refused(value: object, message: str) -> None:
    with pytest.raises(SMPUserError, match=message):
        check_values({"accuracy": value})


def test_numbers_of_all_kinds_are_taken() -> None:
    found = check_values({"a": 1, "b": True, "c": torch.ones(1, 1), "d": torch.tensor(3), "e": float("nan")})
    assert [float(found[name]) for name in "abcd"] == [1.0, 1.0, 1.0, 3.0]


def test_what_waits_for_a_device_uses_no_other() -> None:
    used = []

    def wait(point: LaterPoint) -> None:
        point.arrived()
        used.append(torch.cuda.current_device())

    with emulated(devices=2):
        torch.cuda.set_device(1)
        point = LaterPoint(0, 0.0, {"loss": torch.ones((), device="cuda")})
        thread = threading.Thread(target=wait, args=(point,))
        thread.start()
        thread.join()
    assert used == [1]
