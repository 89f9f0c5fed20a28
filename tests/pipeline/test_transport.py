"""Messages with tensors between processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_runtime.comm.control import ControlPlane, SoloTransport
from smp_runtime.errors import DeadlineError, SMPRuntimeError
from smp_runtime.pipeline.transport.transport import PipelineTransport

CPU = torch.device("cpu")
#: Longer than anything here takes, even on a busy machine.
PATIENCE = 50.0

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


class Box:
    """A transport and what came to it."""

    def __init__(self, world: int, **kwargs: Any) -> None:
        from smp_runtime.job import session

        self.control = kwargs.pop("control", None) or session.current_session().control
        self.messages: queue.SimpleQueue = queue.SimpleQueue()
        self.losses: queue.SimpleQueue = queue.SimpleQueue()
        kwargs.setdefault("on_message", lambda *message: self.messages.put(message))
        self.transport = PipelineTransport(
            self.control, range(world), device=CPU, on_lost=lambda *loss: self.losses.put(loss), **kwargs
        )
        self.stage = self.transport.stage
        self.send = self.transport.send

    def get(self) -> tuple[int, Any, list[torch.Tensor]]:
        return self.messages.get(timeout=PATIENCE)

    def finish(self, world: int) -> None:
        """Leave together, and see that nobody was missed."""
        self.transport.flush(PATIENCE)
        self.control.barrier(range(world))
        self.transport.close()
        self.control.barrier(range(world))
        assert self.losses.empty()


def samples() -> list[torch.Tensor]:
    """Every dtype and every odd way to lie in memory."""
    generator = torch.Generator().manual_seed(1)
    made = [(torch.rand(3, 5, generator=generator) * 7).to(dtype) for dtype in DTYPES]
    base = torch.rand(4, 6, 8, generator=generator)
    made += [torch.tensor(3.5), torch.tensor(True), torch.empty(0), torch.empty(2, 0, 3), base[:, 1:4, ::2]]
    made += [base.transpose(0, 2), base[1], base.flip(0), torch.ones(1, 3).expand(4, 3), base[0, :, 3]]
    made += [torch.rand(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)]
    made += [torch.complex(base, base).conj(), torch.complex(base, base).conj().imag, torch.nn.Parameter(base[2])]
    made += [(base * 2).requires_grad_().exp(), torch.ones(1, 1, 1).expand(1, 5, 1)]
    return made


def exchange(grouped: bool) -> list[str]:
    from smp_runtime.job.backend_implementations import connect_gloo_pair
    from smp_runtime.pipeline.transport.pair_groups import pair_groups

    box = Box(2, make_group=pair_groups(connect_gloo_pair) if grouped else None)
    other = 1 - box.stage
    box.send(other, {"head": (1, "two")}, samples())
    for tensor in samples():
        box.send(other, None, [tensor])
    stage, head, tensors = box.get()
    assert (stage, head) == (other, {"head": (1, "two")})
    tensors += [box.get()[2][0] for _ in tensors]
    wrong = []
    for sent, came in zip(samples() * 2, tensors, strict=True):
        same = came.dtype == sent.dtype and came.shape == sent.shape and torch.equal(came, sent.detach())
        if not same or came.requires_grad or type(came) is not torch.Tensor:
            wrong.append(f"{sent} came as {came}")
        if sent.is_contiguous(memory_format=torch.channels_last) and came.stride() != sent.stride():
            wrong.append(f"{sent.stride()} came as {came.stride()}")
    box.finish(2)
    return wrong


@pytest.mark.parametrize("grouped", [False, True], ids=["inline", "collective"])
def test_every_dtype_and_shape_arrives(ranks, grouped):
    assert ranks(exchange, 2, grouped) == [[], []]


def chatter(count: int, delayed: bool, grouped: bool, network: bool) -> dict[str, Any]:
    from unittest import mock

    from smp_runtime.job.backend_implementations import connect_gloo_pair
    from smp_runtime.pipeline.transport import connections
    from smp_runtime.pipeline.transport.pair_groups import pair_groups

    with mock.patch.object(connections, "own_address", _other_address) if network else contextlib.nullcontext():
        return _chatter(count, delayed, pair_groups(connect_gloo_pair) if grouped else None, network)


def _other_address() -> str:
    """Each rank as if it were on a host of its own."""
    return f"127.0.0.{2 + int(os.environ['RANK'])}"


def _chatter(count: int, delayed: bool, make_group: Any, network: bool) -> dict[str, Any]:
    drawn = random.Random(os.getpid())
    world = 3
    box = Box(
        world,
        delay=(lambda: drawn.random() * 0.002) if delayed else None,
        make_group=make_group,
    )
    families = {peer.connection.family for peer in box.transport._peers.values()}
    assert families == {socket.AF_INET if network else socket.AF_UNIX}
    others = [stage for stage in range(world) if stage != box.stage]

    def contents(sender: int, number: int) -> list[torch.Tensor]:
        sizes = random.Random(1000 * sender + number).choices([0, 1, 7, 1000, 30_000, 200_000], k=2)
        return [torch.full((size,), number, dtype=torch.int32) for size in sizes]

    for number in range(count):
        for other in others:
            box.send(other, number, contents(box.stage, number))
    wrong = []
    next_number = dict.fromkeys(others, 0)
    for _ in range(count * len(others)):
        stage, number, tensors = box.get()
        if number != next_number[stage]:
            wrong.append(f"{number} from {stage} instead of {next_number[stage]}")
        next_number[stage] += 1
        if not all(map(torch.equal, tensors, contents(stage, number))):
            wrong.append(f"wrong contents in {number} from {stage}")
    sent = dict(box.transport.messages_sent), dict(box.transport.bytes_sent)
    expected = sum(t.nbytes for number in range(count) for t in contents(box.stage, number))
    box.finish(world)
    assert all(sent[0][other] == count for other in others)
    assert all(expected < sent[1][other] < expected + count * 500 for other in others)
    return {"wrong": wrong}


@pytest.mark.parametrize(
    ("delayed", "grouped", "network"),
    [(False, False, False), (False, False, True), (True, False, False), (True, True, False)],
    ids=["prompt", "network", "delayed", "collective"],
)
def test_messages_of_a_pair_keep_their_order(ranks, delayed, grouped, network):
    for result in ranks(chatter, 3, 200 if not grouped else 60, delayed, grouped, network):
        assert result["wrong"] == []


def crossing() -> bool:
    box = Box(2)
    big = torch.full((16 * 2**20,), float(box.stage))  # 64 MB
    for number in range(2):
        box.send(1 - box.stage, number, [big])
    right = all(bool((box.get()[2][0] == 1 - box.stage).all()) for _ in range(2))
    box.finish(2)
    return right


def test_big_messages_both_ways_at_once(ranks):
    assert ranks(crossing, 2) == [True, True]


def unread(copy: bool) -> Any:
    """Stage 1 takes nothing until stage 0 has sent everything and changed it."""
    gate = threading.Event()
    messages: queue.SimpleQueue = queue.SimpleQueue()

    def slow(*message: Any) -> None:
        assert gate.wait(PATIENCE)
        messages.put(message)

    box = Box(2, on_message=slow)
    if box.stage == 0:
        tensor = torch.zeros(2 * 2**20)  # 8 MB
        for number in range(8):
            if copy:
                tensor.fill_(number)
                box.send(1, number, [tensor, tensor[::2]])
            else:
                box.send(1, number, [torch.full_like(tensor, number), torch.full((2**20,), number)], copy=False)
        tensor.fill_(-1)
        # Here, though the receiver has not taken the first one: send never waits.
        box.control.send("all sent", 1)
        with pytest.raises(DeadlineError, match=r"stage 1 \(rank 1\).*does not read"):
            box.transport.flush(0.01)
        box.control.send("flush tried", 1)
        box.transport.flush(PATIENCE)
        result = None
    else:
        assert box.control.receive(0) == "all sent"
        assert box.control.receive(0) == "flush tried"
        gate.set()
        got = [messages.get(timeout=PATIENCE) for _ in range(8)]
        result = [(number, {int(v) for t in tensors for v in t.unique()}) for _, number, tensors in got]
    box.finish(2)
    return result


@pytest.mark.parametrize("copy", [True, False])
def test_send_does_not_wait_and_keeps_the_values(ranks, copy):
    assert ranks(unread, 2, copy)[1] == [(number, {number}) for number in range(8)]


def changed_in_place(grouped: bool) -> list[int]:
    from smp_runtime.job.backend_implementations import connect_gloo_pair
    from smp_runtime.pipeline.transport.pair_groups import pair_groups

    box = Box(2, make_group=pair_groups(connect_gloo_pair) if grouped else None)
    tensor = torch.zeros(500_000, dtype=torch.int32)
    for number in range(20):
        tensor.fill_(number)
        box.send(1 - box.stage, None, [tensor])
        tensor.fill_(-1)
    seen = [box.get()[2][0] for _ in range(20)]
    box.finish(2)
    return [int(t.min()) if t.min() == t.max() else -2 for t in seen]


@pytest.mark.parametrize("grouped", [False, True], ids=["inline", "collective"])
def test_the_sender_may_change_what_it_sent(ranks, grouped):
    assert ranks(changed_in_place, 2, grouped) == [list(range(20))] * 2


def dying(forked: bool, folder: str) -> None:
    # Each stage has a thread that receives from it, so that what stage 0 sends may come before what stage 1 sent long ago.
    is_last = os.environ["RANK"] == "2"
    box = Box(3, delay=lambda: float(is_last and threading.current_thread().name == "smp-from-1"))
    heard: dict[int, Any] = {}

    def hear(stage: int) -> Any:
        while stage not in heard:
            sender, words, _ = box.get()
            heard[sender] = words
        return heard[stage]

    answers = [Path(folder, "0"), Path(folder, "2")]
    if box.stage == 1:
        box.send(0, "last words")
        box.send(2, "last words")
        box.transport.flush(PATIENCE)
        if forked and os.fork() == 0:
            # Like a data loader's worker: holds what the rank held, and lives on until the others have noticed.
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and not all(answer.exists() for answer in answers):
                time.sleep(0.05)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    assert hear(1) == "last words"
    started = time.monotonic()
    stage, error = box.losses.get(timeout=PATIENCE)
    seconds = time.monotonic() - started
    for _ in range(3):
        box.send(1, "into the void", [torch.ones(10**6)])  # dropped: on_lost has told
    box.transport.flush(PATIENCE)
    other = 2 - box.stage
    box.send(other, "still here")
    assert hear(other) == "still here"
    assert box.losses.empty()
    box.transport.close()
    written = Path(folder, f"{box.stage}.part")
    written.write_text(json.dumps([stage, type(error).__name__, str(error), seconds]))
    written.rename(Path(folder, str(box.stage)))  # whole as soon as it is there


@pytest.mark.parametrize("forked", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_death_of_a_stage_is_told_once(forked, tmp_path):
    from support.ranks.rank_pool import RankFailed, RankPool

    with RankPool(3) as pool:
        with pytest.raises(RankFailed, match="rank 1 of 3 died"):
            pool.run(dying, 3, forked, str(tmp_path))
        for rank in (0, 2):
            if not (tmp_path / str(rank)).exists():
                assert pool._ranks[rank][1].poll(PATIENCE)
            stage, kind, message, seconds = json.loads((tmp_path / str(rank)).read_text())
            assert (stage, kind) == (1, "ConnectionLostError")
            assert "stage 1 (rank 1)" in message
            assert "look for the first error in the log of rank 1" in message
            assert seconds < PATIENCE / 2  # by itself, not when something else ends


def leaving() -> str:
    box = Box(2)
    other = 1 - box.stage
    if box.stage == 0:
        box.send(1, "bye", [torch.ones(3 * 10**6)])
        box.transport.close()
        box.transport.close()
        box.control.barrier([0, 1])
        with pytest.raises(SMPRuntimeError, match="after closing its transport"):
            box.send(1, "late")
        message = ""
    else:
        assert torch.equal(box.get()[2][0], torch.ones(3 * 10**6))
        box.control.barrier([0, 1])
        deadline = time.monotonic() + PATIENCE
        for thread in threading.enumerate():
            if thread.name == "smp-from-0":
                thread.join(deadline - time.monotonic())
        with pytest.raises(SMPRuntimeError, match="stage 0 .*has closed its transport in good order") as caught:
            box.send(other, "to nobody")
        message = str(caught.value)
        box.transport.close()
    box.control.barrier([0, 1])
    assert box.losses.empty()
    return message


def test_leaving_in_good_order_is_silent(ranks):
    assert "stage 1 sends to stage 0 (rank 0)" in ranks(leaving, 2)[1]


class Intruded:
    """A control plane that lets strangers call every member before the others do."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self.rank, self.size = control.rank, control.size
        self.strangers: list[socket.socket] = []

    def allgather(self, payload: Any, ranks: Sequence[int]) -> list[Any]:
        everyone = self._control.allgather(payload, ranks)
        if self.rank == max(ranks):
            for host, port, name, _ in everyone[:-1]:
                claim = b"x" * 32 + self.rank.to_bytes(4, "big")  # a member's place, without the secret
                for words in (b"", b"GET / HTTP/1.0\r\n\r\n", claim, b"y" * 1000):
                    for family, place in ((socket.AF_INET, (host, port)), (socket.AF_UNIX, name)):
                        stranger = socket.socket(family)
                        stranger.settimeout(PATIENCE)
                        stranger.connect(place)
                        stranger.sendall(words)
                        self.strangers.append(stranger)
        return everyone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)


def intruded() -> Any:
    from smp_runtime.job import session

    control = Intruded(session.current_session().control)
    box = Box(3, control=control)
    for other in range(3):
        box.send(other, box.stage)
    senders = sorted(box.get()[:2] for _ in range(3))
    refused = 0
    for stranger in control.strangers:
        try:
            refused += stranger.recv(1) == b""
        except ConnectionResetError:
            refused += 1
    box.finish(3)
    return senders, refused


def test_strangers_are_refused(ranks):
    results = ranks(intruded, 3)
    assert [senders for senders, _ in results] == [[(0, 0), (1, 1), (2, 2)]] * 3
    assert results[2][1] == 16


def nudged() -> Any:
    untold = ["news"]
    box = Box(2, afterthought=lambda stage: (untold.pop(), stage) if untold else None)
    other = 1 - box.stage
    box.transport.nudge(other)
    news = box.get()[:2]
    box.control.barrier(range(2))
    box.transport.nudge(other)  # all is said, so nothing comes of it
    box.send(other, "last")
    last = box.get()[:2]
    box.finish(2)
    return news, last


def test_what_can_wait_is_sent_without_a_message_of_its_caller(ranks):
    assert ranks(nudged, 2) == [((1, ("news", 0)), (1, "last")), ((0, ("news", 1)), (0, "last"))]


def failing_callback() -> Any:
    arrived: queue.Queue[str] = queue.Queue()  # a message may come while the box is still being made

    def fail(stage: int, head: Any, tensors: list[torch.Tensor]) -> None:
        if head == "bad":
            raise KeyError("in on_message")
        arrived.put(head)

    box = Box(2, on_message=fail)
    box.send(1 - box.stage, "bad")
    box.send(1 - box.stage, "good")
    good = arrived.get(timeout=PATIENCE)
    stage, error = box.losses.get(timeout=PATIENCE)
    box.finish(2)
    return good, stage, repr(error)


def test_an_exception_of_the_callback_is_told_and_the_next_message_comes(ranks):
    assert ranks(failing_callback, 2) == [
        ("good", 1, "KeyError('in on_message')"),
        ("good", 0, "KeyError('in on_message')"),
    ]


def kept_alive() -> list[bool]:
    import weakref

    died = threading.Event()
    done = threading.Event()

    def look(stage: int, head: Any, tensors: list[torch.Tensor]) -> None:
        weakref.finalize(tensors[0], died.set)
        done.set()

    box = Box(2, on_message=look)
    box.send(1 - box.stage, None, [torch.ones(10)])
    result = [done.wait(PATIENCE), died.wait(PATIENCE)]
    box.finish(2)
    return result


def test_nothing_keeps_a_tensor_that_was_handed_over(ranks):
    assert ranks(kept_alive, 2) == [[True, True]] * 2


def one_missing() -> str:
    from smp_runtime.job import session

    control = session.current_session().control
    if control.rank == 1:
        control.allgather(("127.0.0.1", 1, b"0" * 32), [0, 1])  # says where it listens, and never calls
        control.barrier([0, 1])
        return ""
    os.environ["SMP_TIMEOUT_SECONDS"] = "1"  # the rank's own environment comes back after the case
    with pytest.raises(DeadlineError) as caught:
        Box(2)
    os.environ["SMP_TIMEOUT_SECONDS"] = str(PATIENCE)
    control.barrier([0, 1])
    return str(caught.value)


def test_a_stage_that_does_not_connect_is_named(ranks):
    message = ranks(one_missing, 2)[0]
    assert "stage(s) 1 (rank 1) did not connect in time" in message
    assert "SMP_TIMEOUT_SECONDS" in message


def alone(**kwargs: Any) -> tuple[PipelineTransport, list]:
    got: list = []
    transport = PipelineTransport(
        ControlPlane(SoloTransport()),
        [0],
        device=CPU,
        on_message=lambda *message: got.append(message),
        on_lost=lambda *loss: got.append(loss),
    )
    return transport, got


def test_a_message_to_the_own_stage_is_delivered_at_once_as_it_is():
    transport, got = alone()
    tensor, head = torch.ones(1, requires_grad=True), object()
    transport.send(0, head, [tensor])
    assert got[0][0] == 0
    assert got[0][1] is head
    assert got[0][2][0] is tensor
    transport.flush(0)
    transport.close()
