"""Channels of an accelerator: how their groups meet, what fails on them, what they keep; with gloo in NCCL's place."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from smp_runtime.errors import DeadlineError, SMPRuntimeError, SMPUserError
from smp_runtime.pipeline.transport import tensor_channels as channels
from smp_runtime.pipeline.transport.tensor_channels import (
    CollectiveChannel,
    InlineChannel,
    channel_of,
    choose_channels,
    directed_groups,
    to_dense,
)
from smp_runtime.pipeline.transport.transport import PipelineTransport

CPU = torch.device("cpu")
#: Longer than anything here takes, even on a busy machine.
PATIENCE = 50.0


def _transport(world: int, **kwargs: Any) -> Any:
    """A transport with process groups, and queues of what came to it, what it lost and what failed."""
    from smp_runtime.job import session

    control = session.current_session().control
    came: queue.SimpleQueue = queue.SimpleQueue()
    lost: queue.SimpleQueue = queue.SimpleQueue()
    failed: queue.SimpleQueue = queue.SimpleQueue()

    def on_failed(error: BaseException, doing: str) -> str:
        failed.put((type(error).__name__, doing))
        return f"{doing}: {error}"

    kwargs.setdefault("device", CPU)
    kwargs.setdefault("on_message", lambda *message: came.put(message))
    kwargs.setdefault("make_group", directed_groups([range(world)], "gloo"))
    made = PipelineTransport(control, range(world), on_lost=lambda *loss: lost.put(loss), on_failed=on_failed, **kwargs)
    return types.SimpleNamespace(transport=made, control=control, came=came, lost=lost, failed=failed)


def _answering() -> tuple[bool, list[str]]:
    """Both ranks answer on the threads that receive; their groups connect like NCCL's: at first use, and both at once."""
    store, connected, meetings = dist.distributed_c10d._get_default_store(), set(), []
    post, receive = CollectiveChannel.post, CollectiveChannel.receive
    mine = dist.get_rank()

    def connect(channel: CollectiveChannel, sends: bool) -> None:
        if id(channel) in connected:
            return
        connected.add(id(channel))
        source, target = (mine, channel._peer) if sends else (channel._peer, mine)
        here, there = ("source", "target") if sends else ("target", "source")
        store.set(f"{source} to {target}: {here}", "")
        store.wait([f"{source} to {target}: {there}"], channels.timedelta(seconds=5))
        meetings.append(f"{source} to {target}")

    def connecting_post(channel: CollectiveChannel, tensor: torch.Tensor) -> None:
        connect(channel, True)
        post(channel, tensor)

    def connecting_receive(channel: CollectiveChannel, *args: Any) -> torch.Tensor:
        connect(channel, False)
        return receive(channel, *args)

    asked, came, box = threading.Barrier(2), threading.Event(), []

    def on_message(stage: int, head: str, tensors: list[torch.Tensor]) -> None:
        if head == "question":
            asked.wait(PATIENCE)
            box[0].transport.send(stage, "answer", [torch.ones(4)])
        else:
            came.set()

    with (
        mock.patch.object(CollectiveChannel, "post", connecting_post),
        mock.patch.object(CollectiveChannel, "receive", connecting_receive),
    ):
        box.append(_transport(2, on_message=on_message))
        box[0].transport.send(1 - mine, "question")
        box[0].control.barrier([0, 1])
        asked.wait(PATIENCE)
        # An answer that waits for ever gives up before this.
        result = came.wait(PATIENCE), meetings
        box[0].control.barrier([0, 1])
        box[0].transport.close()
        box[0].control.barrier([0, 1])
    return result


def test_groups_connect_in_one_order_before_threads_use_them(ranks):
    assert ranks(_answering, 2) == [(True, ["0 to 1", "1 to 0"])] * 2


def _alone(how: str) -> str:
    """Rank 1 takes no part in connecting the groups, or cannot; what rank 0 raises."""
    from smp_runtime.job import session
    from smp_runtime.pipeline.transport import transport

    groups = directed_groups([[0, 1]], "gloo")
    if dist.get_rank() == 1 and how == "absent":
        with mock.patch.object(transport, "meet"):
            box = _transport(2, make_group=groups)
        box.control.barrier([0, 1])
        return ""
    if dist.get_rank() == 1:
        box = _transport(2, make_group=groups)
        box.control.barrier([0, 1])
        return ""
    os.environ["SMP_TIMEOUT_SECONDS"] = "1" if how == "absent" else "60"  # the old one comes back after the case
    receive = CollectiveChannel.receive

    def refused(channel: CollectiveChannel, *args: Any) -> torch.Tensor:
        receive(channel, *args)
        raise dist.DistBackendError("NCCL error: unhandled system error")

    with (
        mock.patch.object(CollectiveChannel, "receive", refused) if how == "error" else mock.MagicMock(),
        pytest.raises(DeadlineError if how == "absent" else SMPRuntimeError) as caught,
    ):
        _transport(2, make_group=groups)
    os.environ["SMP_TIMEOUT_SECONDS"] = str(PATIENCE)
    session.current_session().control.barrier([0, 1])
    return str(caught.value)


def test_a_group_that_does_not_connect_in_time_is_named(ranks):
    message = ranks(_alone, 2, "absent")[0]
    assert "process group from rank 0 to rank 1 was not connected after 1 s" in message
    assert "SMP_TIMEOUT_SECONDS" in message


def test_a_group_that_does_not_work_is_named_with_its_error(ranks):
    message = ranks(_alone, 2, "error")[0]
    assert "process group from rank 1 to rank 0 did not carry its first element" in message
    assert "DistBackendError: NCCL error: unhandled system error" in message
    assert "NCCL_SOCKET_IFNAME" in message


def _failing_post() -> list[Any]:
    """The second tensor of a message cannot be sent; the other side must not wait for it, or for the message."""
    box = _transport(2)
    post, posted = CollectiveChannel.post, []

    def failing(channel: CollectiveChannel, tensor: torch.Tensor) -> None:
        posted.append(tensor)
        if len(posted) == 2:
            raise dist.DistBackendError("NCCL error: invalid usage")
        post(channel, tensor)

    seen: list[Any] = []
    if box.transport.stage == 0:
        with mock.patch.object(CollectiveChannel, "post", failing), pytest.raises(dist.DistBackendError):
            box.transport.send(1, "half", [torch.ones(3), torch.ones(4)])
        box.transport.send(1, "dropped")
        seen += [box.failed.get(timeout=PATIENCE), len(posted)]
    else:
        stage, error = box.lost.get(timeout=PATIENCE)
        box.transport.send(0, "dropped")
        seen += [stage, type(error).__name__, str(error), error.words]
    box.control.barrier([0, 1])
    seen += [box.came.empty(), box.lost.empty(), box.failed.empty()]
    box.transport.close()
    box.control.barrier([0, 1])
    return seen


def test_a_tensor_that_cannot_be_sent_is_told_as_the_senders_error(ranks):
    here, there = ranks(_failing_post, 2)
    assert here == [("DistBackendError", "sending to stage 1"), 2, True, True, True]
    words = "sending to stage 1: NCCL error: invalid usage"
    assert there == [
        *(0, "StageFailed", f"stage 0 (rank 0) cannot go on, as its last message says: {words}", words),
        *(True, True, True),
    ]


def _dies_in_a_tensor(folder: str) -> None:
    """Rank 1 announces a tensor and dies; rank 0 waits for it in the process group."""
    box = _transport(2)
    if box.transport.stage == 1:
        with mock.patch.object(CollectiveChannel, "post"):
            box.transport.send(0, "announced", [torch.ones(1000)])
        assert box.control.receive(0) == "waits"
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while not _is_receiving():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    box.control.send("waits", 1)
    stage, error = box.lost.get(timeout=PATIENCE)
    written = Path(folder, "0.part")
    written.write_text(json.dumps([stage, type(error).__name__, str(error), box.failed.empty()]))
    written.rename(Path(folder, "0"))  # whole as soon as it is there


def _is_receiving() -> bool:
    """Whether the receiver thread is inside the process group."""
    for thread in threading.enumerate():
        frame = sys._current_frames().get(thread.ident or 0) if thread.name == "smp-from-1" else None
        while frame is not None:
            if frame.f_code is CollectiveChannel._receive.__code__:
                return True
            frame = frame.f_back
    return False


def test_a_rank_that_dies_in_the_middle_of_a_tensor_is_a_lost_one(tmp_path):
    from support.ranks.rank_pool import RankFailed, RankPool

    with RankPool(2) as pool:
        with pytest.raises(RankFailed, match="rank 1 of 2 died"):
            pool.run(_dies_in_a_tensor, 2, str(tmp_path))
        if not (tmp_path / "0").exists():
            assert pool._ranks[0][1].poll(PATIENCE)
        stage, kind, message, nothing_failed = json.loads((tmp_path / "0").read_text())
        assert (stage, kind, nothing_failed) == (1, "ConnectionLostError", True)
        assert "look for the first error in the log of rank 1" in message


def _held_up() -> list[bool]:
    """A thread is held up in posting a tensor; what others send without tensors of the channel goes past it."""
    box = _transport(2)
    other = 1 - box.transport.stage
    inside, release = threading.Event(), threading.Event()
    post = CollectiveChannel.post

    def slow(channel: CollectiveChannel, tensor: torch.Tensor) -> None:
        inside.set()
        assert release.wait(PATIENCE)
        post(channel, tensor)

    with mock.patch.object(CollectiveChannel, "post", slow):
        poster = threading.Thread(target=box.transport.send, args=(other, "tensor", [torch.ones(2)]))
        poster.start()
        assert inside.wait(PATIENCE)
        plain = threading.Thread(target=box.transport.send, args=(other, "plain"), daemon=True)
        plain.start()
        plain.join(5)
        passed = not plain.is_alive()
        release.set()
        poster.join(PATIENCE)
    heads = {box.came.get(timeout=PATIENCE)[1] for _ in range(2)}
    box.control.barrier([0, 1])
    box.transport.close()
    box.control.barrier([0, 1])
    return [passed, heads == {"plain", "tensor"}]


def test_messages_without_tensors_never_wait_for_a_channel(ranks):
    assert ranks(_held_up, 2) == [[True, True]] * 2


def _devices_of_threads() -> list[tuple[str, str]]:
    chosen: queue.SimpleQueue = queue.SimpleQueue()

    def choose(device: torch.device) -> None:
        chosen.put((threading.current_thread().name, str(device)))

    with mock.patch.object(torch.cuda, "set_device", choose):
        box = _transport(2, device=torch.device("cuda", 3), make_group=None)
        result = sorted(chosen.get(timeout=PATIENCE) for _ in range(2))
    box.control.barrier([0, 1])
    box.transport.close()
    box.control.barrier([0, 1])
    return result


def test_threads_of_the_transport_compute_on_the_ranks_own_device(ranks):
    for stage, seen in enumerate(ranks(_devices_of_threads, 2)):
        assert seen == [(f"smp-from-{1 - stage}", "cuda:3"), (f"smp-to-{1 - stage}", "cuda:3")]


@pytest.mark.parametrize(
    ("place", "ours", "channel"),
    [
        ("cuda:1", "cuda:1", 1),
        ("cuda:2", "cuda", 1),
        ("cpu", "cuda:1", 0),
        ("cuda:0", "cuda:1", None),
        ("cuda:0", "cuda", None),
    ],
)
def test_a_tensor_of_another_accelerator_of_the_host_is_foreign(place, ours, channel):
    where = torch.device(place)
    tensor: Any = types.SimpleNamespace(device=where, is_cpu=where.type == "cpu")
    device = torch.device(ours)
    with mock.patch.object(torch.cuda, "current_device", return_value=2):
        if channel is not None:
            assert channel_of(tensor, choose_channels(device, 1, None), device) == channel
            return
        with pytest.raises(SMPUserError, match=rf"on {place}, but this rank computes on {ours}; .*\.to\('{ours}'\)"):
            channel_of(tensor, choose_channels(device, 1, None), device)


def test_what_has_been_sent_is_given_back():
    works: list[Any] = []

    def isend(flat: torch.Tensor, **kwargs: Any) -> Any:
        works.append(mock.Mock(**{"is_completed.return_value": False}))
        return works[-1]

    channel = CollectiveChannel(object(), 1, CPU)  # type: ignore[arg-type]
    with mock.patch.object(dist, "isend", isend):
        for _ in range(3):
            channel.post(torch.ones(8))
    channel.prune()
    assert len(channel._leaving) == 3
    for work in works[:2]:
        work.is_completed.return_value = True
    channel.prune()
    assert len(channel._leaving) == 1
    works[2].is_completed.return_value = True
    channel.prune()
    assert not channel._leaving


def _pruned() -> int:
    from support.training.pipeline_training import summing_step
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    smp.set_partition(net[1], 1)
    model = smp.DistributedModel(net)
    train = summing_step(model)
    train(torch.ones(2, 4))
    with mock.patch.object(PipelineTransport, "prune") as prune:
        train(torch.ones(2, 4))
        train(torch.ones(2, 4))
    return prune.call_count


def test_every_step_gives_back_what_it_has_sent(ranks):
    settings = {"partitions": 2, "auto_partition": False, "default_partition": 0}
    assert ranks(_pruned, 2, config=settings) == [2, 2]


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_what_has_no_dense_memory_is_refused(tensor, what):
    with pytest.raises(SMPUserError, match=f"{what}.*to_dense"):
        to_dense(tensor)


def test_a_foreign_device_is_named():
    with pytest.raises(SMPUserError, match=r"on meta, but this rank computes on cpu.*\.to\('cpu'\)"):
        channel_of(torch.ones(1, device="meta"), choose_channels(CPU, 1, None), CPU)


def test_the_right_channel_for_each_device():
    cuda = torch.device("cuda", 0)
    assert [type(channel) for channel in choose_channels(CPU, 1, None)] == [InlineChannel]
    assert [type(channel) for channel in choose_channels(cuda, 1, None)] == [InlineChannel, InlineChannel]
    group: dist.ProcessGroup = object()  # type: ignore[assignment]
    assert [type(channel) for channel in choose_channels(CPU, 1, group)] == [InlineChannel, CollectiveChannel]
