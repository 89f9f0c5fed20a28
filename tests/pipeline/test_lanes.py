"""Channels of an accelerator: how their groups meet, what fails on them, what they keep; with gloo in NCCL's place."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from smp_runtime.errors import DeadlineError, SMPUserError
from smp_runtime.job.backend_implementations import connect_gloo_pair
from smp_runtime.pipeline.transport import tensor_channels as channels
from smp_runtime.pipeline.transport import transport
from smp_runtime.pipeline.transport.pair_groups import PairGroup, pair_groups
from smp_runtime.pipeline.transport.tensor_channels import (
    GroupChannel,
    InlineChannel,
    channel_of,
    choose_channels,
    to_dense,
)
from smp_runtime.pipeline.transport.transport import PipelineTransport

CPU = torch.device("cpu")
#: Longer than anything here takes, even on a busy machine.
PATIENCE = 50.0


def _transport(world: int, *, connects: bool = True, **kwargs: Any) -> Any:
    """A transport with connected process groups, and queues of what came to it, what it lost and what failed."""
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
    kwargs.setdefault("make_group", pair_groups(connect_gloo_pair))
    made = PipelineTransport(control, range(world), on_lost=lambda *loss: lost.put(loss), on_failed=on_failed, **kwargs)
    box = types.SimpleNamespace(transport=made, control=control, came=came, lost=lost, failed=failed)
    if connects:
        _connect(box)
        control.barrier(range(world))
    return box


def _connect(box: Any) -> None:
    """Connect both groups with every other stage, which otherwise happens beside the first tensors."""
    deadline = time.monotonic() + PATIENCE
    for peer in box.transport._peers.values():
        box.transport._open_out(peer)
    for peer in box.transport._peers.values():
        while not (peer.out[1].is_open and peer.back[1].is_open):
            assert time.monotonic() < deadline
            time.sleep(0.001)


def _finish(box: Any) -> None:
    box.control.barrier([0, 1])
    box.transport.close()
    box.control.barrier([0, 1])


def _answering() -> bool:
    """Both ranks answer on the threads that receive, where each could wait for the other to connect."""
    asked, came, box = threading.Barrier(2), threading.Event(), []
    mine = dist.get_rank()

    def on_message(stage: int, head: str, tensors: list[torch.Tensor]) -> None:
        if head == "question":
            asked.wait(PATIENCE)
            box[0].transport.send(stage, "answer", [torch.ones(4)])
        else:
            assert torch.equal(tensors[0], torch.ones(4))
            came.set()

    box.append(_transport(2, connects=False, on_message=on_message))
    box[0].transport.send(1 - mine, "question")
    box[0].control.barrier([0, 1])
    asked.wait(PATIENCE)
    came_in_time = came.wait(PATIENCE)
    _connect(box[0])
    _finish(box[0])
    return came_in_time


def test_ranks_that_answer_each_other_at_once_connect(ranks):
    assert ranks(_answering, 2) == [True, True]


def _alone(how: str) -> list[Any]:
    """Connect from rank 0 to rank 1, one of which does not take part or cannot; return what both learn."""
    sends = dist.get_rank() == 0
    own = GroupChannel.open

    def refused(channel: GroupChannel, *args: Any) -> None:
        own(channel, *args)
        raise dist.DistBackendError("NCCL error: unhandled system error")

    with contextlib.ExitStack() as patches:
        # Before there is a transport: the other rank may send as soon as it has its own.
        if how == "error" and sends:
            patches.enter_context(mock.patch.object(GroupChannel, "open", refused))
        if how == "absent" and not sends:
            patches.enter_context(mock.patch.object(PipelineTransport, "_begin_opening"))
        box = _transport(2, connects=False)
        os.environ["SMP_TIMEOUT_SECONDS"] = "1" if how == "absent" else "60"  # the old one comes back after the case
        if sends:
            box.transport.send(1, "tensor", [torch.ones(2)])
            result = [box.failed.get(timeout=PATIENCE)]
        else:
            _, head, tensors = box.came.get(timeout=PATIENCE)  # through host memory, meanwhile
            result = [head, tensors[0].tolist(), box.lost.get(timeout=PATIENCE)[1].words]
    os.environ["SMP_TIMEOUT_SECONDS"] = str(PATIENCE)
    _finish(box)
    return result


def test_a_group_that_does_not_connect_in_time_is_named(ranks):
    here, there = ranks(_alone, 2, "absent")
    assert here == [("DeadlineError", "connecting to stage 1")]
    head, values, words = there
    assert (head, values) == ("tensor", [1.0, 1.0])
    assert "process group from rank 0 to rank 1 was not connected after 1 s" in words
    assert "SMP_TIMEOUT_SECONDS" in words


def test_a_group_that_does_not_work_is_named_with_its_error(ranks):
    here, there = ranks(_alone, 2, "error")
    assert here == [("SMPRuntimeError", "connecting to stage 1")]
    assert "process group from rank 0 to rank 1 did not carry its first element" in there[2]
    assert "DistBackendError: NCCL error: unhandled system error" in there[2]
    assert "NCCL_SOCKET_IFNAME" in there[2]


def _failing_post() -> list[Any]:
    """The second tensor of a message cannot be sent; the other side must not wait for it, or for the message."""
    box = _transport(2)
    post, posted = GroupChannel.post, []

    def failing(channel: GroupChannel, tensor: torch.Tensor) -> None:
        posted.append(tensor)
        if len(posted) == 2:
            raise dist.DistBackendError("NCCL error: invalid usage")
        post(channel, tensor)

    seen: list[Any] = []
    if box.transport.stage == 0:
        with mock.patch.object(GroupChannel, "post", failing), pytest.raises(dist.DistBackendError):
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
        with mock.patch.object(GroupChannel, "post"):
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
            if frame.f_code is GroupChannel._receive.__code__:
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
    post = GroupChannel.post

    def slow(channel: GroupChannel, tensor: torch.Tensor) -> None:
        inside.set()
        assert release.wait(PATIENCE)
        post(channel, tensor)

    with mock.patch.object(GroupChannel, "post", slow):
        poster = threading.Thread(target=box.transport.send, args=(other, "tensor", [torch.ones(2)]))
        poster.start()
        assert inside.wait(PATIENCE)
        plain = threading.Thread(target=box.transport.send, args=(other, "plain"), daemon=True)
        plain.start()
        plain.join(PATIENCE / 2)
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
        box = _transport(2, device=torch.device("cuda", 3), make_group=None, connects=False)
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
            assert channel_of(tensor, choose_channels(device, 1, None, sends=True), device) == channel
            return
        with pytest.raises(SMPUserError, match=rf"on {place}, but this rank computes on {ours}; .*\.to\('{ours}'\)"):
            channel_of(tensor, choose_channels(device, 1, None, sends=True), device)


class _Sends:
    """A backend whose sends end when the test says so."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def send(self, flats: list[torch.Tensor], *args: Any) -> Any:
        self.works.append(mock.Mock(**{"is_completed.return_value": False}))
        return self.works[-1]


def _posting(device: torch.device, count: int) -> tuple[GroupChannel, list[Any], list[weakref.ref[torch.Tensor]]]:
    """A channel that has posted tensors, their works, and references to their memory."""
    sends = _Sends()
    with mock.patch.object(torch.cuda, "Stream"):
        channel = GroupChannel(lambda *args: PairGroup(sends), 1, device, sends=True)
    channel._group = PairGroup(sends, 0.0)
    memories = []
    for _ in range(count):
        tensor = torch.ones(8)
        memories.append(weakref.ref(tensor.untyped_storage()))
        channel.post(tensor)
    return channel, sends.works, memories


def test_what_has_been_sent_is_given_back():
    channel, works, memories = _posting(CPU, 3)
    del memories
    channel.prune()
    assert len(channel._leaving) == 3
    for work in works[:2]:
        work.is_completed.return_value = True
    channel.prune()
    assert len(channel._leaving) == 1
    works[2].is_completed.return_value = True
    channel.prune()
    assert not channel._leaving


def test_memory_of_sends_under_way_outlives_their_channel():
    """NCCL may read it until the send is over, however the channel has ended."""
    channel, works, _ = _posting(torch.device("cuda", 0), 2)
    works[0].is_completed.return_value = True
    channel.prune()
    kept = [flat for _, flat in channel._leaving]
    before = len(channels._unfinished)
    with pytest.raises(DeadlineError, match="rank 1 did not take all tensors"):
        channel.flush(time.monotonic())  # it waits no longer than that
    channel.close(0.0)
    del channel
    gc.collect()
    assert [flat for _, flat in channels._unfinished[before:]] == kept
    del channels._unfinished[before:]


def _left_early() -> tuple[int, bool]:
    """Stage 0 leaves while a tensor that it has received is still under way in the eyes of stage 1."""
    box = _transport(2)
    if box.transport.stage == 1:
        box.transport.send(0, "tensor", [torch.ones(4)])
        peer = box.transport._peers[0]
        channel = peer.out[1]
        work = mock.Mock(wraps=channel._leaving[-1][0])
        channel._leaving[-1] = work, channel._leaving[-1][1]
        deadline = time.monotonic() + PATIENCE
        while not peer.left:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        box.transport.close()
        result = work.wait.call_count, not channel._leaving
    else:
        box.came.get(timeout=PATIENCE)
        box.transport.close()
        result = 0, True
    box.control.barrier([0, 1])
    return result


def test_a_stage_that_ends_waits_for_its_sends_to_one_that_has_left(ranks):
    assert ranks(_left_early, 2)[1] == (1, True)


def _left_apart(goes_on: bool) -> list[bool]:
    """Leave, stage 1 later than stage 0; return for each group whether the other stage still read when it was freed.

    Args:
        goes_on: whether stage 1 leaves only when stage 0 has left.
    """
    box = _transport(2)
    peer = box.transport._peers[1 - box.transport.stage]
    freed = []

    def end(group: PairGroup, patience: float) -> bool:
        freed.append(peer.reading)
        return True

    with mock.patch.object(PairGroup, "end", end):
        if box.transport.stage == 1:
            if goes_on:
                box.control.barrier([0, 1])
            time.sleep(0.2)  # so that stage 0 would free its groups first, if it did not wait
        with mock.patch.object(transport, "_CLOSE_SECONDS_LEFT", 0.5 if goes_on else PATIENCE):
            box.transport.close()
        if box.transport.stage == 0 and goes_on:
            box.control.barrier([0, 1])
        box.control.barrier([0, 1])
    return freed


@pytest.mark.parametrize(("goes_on", "reads"), [(False, [[False] * 2] * 2), (True, [[True] * 2, [False] * 2])])
def test_groups_are_freed_when_both_stages_have_said_goodbye(ranks, goes_on, reads):
    """A stage that leaves first waits, since the other one may still receive from its memory, but not for long."""
    assert ranks(_left_apart, 2, goes_on) == reads


#: A thread is in a call of C++ when the script ends, and returns while the interpreter is finalized.
_RETURNS_LATE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from smp_runtime.pipeline.transport.native_calls import start_call

class Late:
    def __del__(self):
        time.sleep(1)

def wait():
    try:
        dist.HashStore().wait(["absent"], timedelta(seconds=0.5))
    except RuntimeError:
        pass

start_call(wait, "call")
sys.modules["late"] = Late()
"""


def test_a_call_that_returns_after_the_script_does_not_end_the_process_by_a_signal():
    done = subprocess.run([sys.executable, "-c", _RETURNS_LATE], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


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
        channel_of(torch.ones(1, device="meta"), choose_channels(CPU, 1, None, sends=True), CPU)


def test_the_right_channel_for_each_device():
    cuda = torch.device("cuda", 0)
    assert [type(channel) for channel in choose_channels(CPU, 1, None, sends=True)] == [InlineChannel]
    assert [type(channel) for channel in choose_channels(cuda, 1, None, sends=True)] == [InlineChannel, InlineChannel]
    made = choose_channels(CPU, 1, pair_groups(connect_gloo_pair), sends=True)
    assert [type(channel) for channel in made] == [InlineChannel, GroupChannel, InlineChannel]
    assert channel_of(torch.ones(1), made, CPU) == 2  # the group is not connected
