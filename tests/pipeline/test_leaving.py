"""Ranks that die, end their script early, or come late: what the others are told, and how soon."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from support.matrix import sampled
from support.ranks.rank_pool import RankFailed, RankPool
from support.training.pipeline_training import summing_step
from torch import nn

from smp_runtime.errors import SMPRuntimeError
from smp_runtime.pipeline.execution.failures import Alarm, StageError
from smp_runtime.pipeline.execution.messenger import Messenger
from smp_runtime.pipeline.transport.peer import Peer


def _dies(folder, good):
    import smdistributed.modelparallel.torch as smp

    class Dying(nn.Linear):
        dies = False

        def forward(self, x):
            if self.dies:
                os._exit(3)
            return super().forward(x)

    net = nn.Sequential(nn.Linear(4, 4), Dying(4, 4), nn.Linear(4, 4))
    smp.set_partition(net[1], 1)
    smp.set_partition(net[2], 2)
    model = smp.DistributedModel(net)
    train = summing_step(model)
    for _ in range(good):
        train(torch.ones(2, 4))
    if smp.rank() == 0:
        assert model.pipeline.context.root_program.was_followed == (good > 1)
    net[1].dies = True
    seen = []
    for _ in range(2):
        began = time.monotonic()
        try:
            train(torch.ones(2, 4))
        except Exception as error:
            seen.append((type(error).__name__, str(error), time.monotonic() - began))
    written = pathlib.Path(folder, f"{smp.rank()}.part")
    written.write_text(json.dumps(seen))
    written.rename(pathlib.Path(folder, str(smp.rank())))  # whole as soon as it is there
    smp.barrier()  # nobody else leaves before all have seen it; rank 1 never comes


@pytest.mark.parametrize("good", [1, 6])
def test_a_rank_that_dies_ends_the_step_of_the_others_at_once(tmp_path, good):
    with RankPool(3) as pool:
        settings = {"partitions": 3, "auto_partition": False, "default_partition": 0, "step_program": True}
        with pytest.raises(RankFailed, match="rank 1 of 3 died"):
            pool.run(_dies, 3, str(tmp_path), good, config=settings, timeout=100)
        for rank in ("0", "2"):
            deadline = time.monotonic() + 30
            while not (tmp_path / rank).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            (kind, text, seconds), (again, _, _) = json.loads((tmp_path / rank).read_text())
            assert kind == again == "StageError"
            assert "stage 1 (rank 1)" in text
            assert seconds < 20


def _leaves(who, after):
    """Train; one rank goes ``after`` so many steps, as if its script had ended. What the others see."""
    import smdistributed.modelparallel.torch as smp

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for stage in range(1, smp.pp_size()):
        smp.set_partition(net[stage], stage)
    train = summing_step(smp.DistributedModel(net))
    seen = []
    for number in range(after + 2):
        if number >= after and smp.rank() == who:
            break
        began = time.monotonic()
        try:
            train(torch.ones(2, 4))
        except Exception as error:
            seen.append((number, type(error).__name__, str(error), time.monotonic() - began))
    return seen


@pytest.mark.parametrize(
    ("after", "world", "who"),
    sampled(
        [(after, *of) for after in (1, 5) for of in ((2, 0), (2, 1), (3, 2))],
        {(1, 2, 0), (5, 2, 1), (1, 3, 2), (5, 3, 2)},
    ),
)
def test_a_rank_that_ends_its_script_early_ends_the_steps_of_the_others_at_once(ranks, world, who, after):
    settings = {"partitions": world, "auto_partition": False, "default_partition": 0}
    # Rank 0 is the root stage.
    found = ranks(_leaves, world, who, after, config=settings, timeout=50)
    assert found[who] == []
    for rank, seen in enumerate(found):
        if rank == who:
            continue
        assert [number for number, *_ in seen] == [after, after + 1]
        for _, kind, text, seconds in seen:
            assert kind == "StageError"
            assert "has ended its script" in text
            assert seconds < 20
        assert f"rank {who} (pipeline stage {who}) has ended its script or called smp.shutdown()" in seen[0][2]
        assert "same number of steps" in seen[0][2]


def test_a_rank_that_ends_its_script_while_a_message_is_sent_to_it_is_named():
    messenger = Messenger(threading.RLock())
    alarm = Alarm(0, [4, 7], None, threading.Condition(), lambda: True, messenger.send)

    class Closing:
        def send(self, stage, *_, **__):
            alarm.left_stage(stage)
            raise SMPRuntimeError("nothing can be sent")

    messenger._alarm, messenger.transport = alarm, Closing()
    with pytest.raises(StageError, match=r"rank 7 \(pipeline stage 1\) has ended its script"):
        messenger.send(1, None)


def _comes_late():
    """A stage without work enters the last step when the others have long left it, and the job."""
    import smdistributed.modelparallel.torch as smp

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    smp.set_partition(net[0], 1)
    model = smp.DistributedModel(net)
    train, losses = summing_step(model), []
    for number in range(10):
        if number == 9 and smp.rank() == 0:
            time.sleep(2.0)
        losses.append(float(train(torch.ones(2, 4)).reduce_mean()))
    return losses, model.pipeline.replayed


def test_leaving_after_the_last_step_is_no_error_for_a_stage_that_is_late(ranks):
    settings = {"partitions": 3, "auto_partition": False, "default_partition": 2}
    results = ranks(_comes_late, 3, config=settings, timeout=60)
    assert [result == results[0] for result in results] == [True] * 3


def test_a_pipeline_ends_with_the_session_though_its_model_is_gone(ranks):
    def threads():
        import threading

        import torch
        from torch import nn

        import smdistributed.modelparallel.torch as smp

        def train():
            model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

            @smp.step
            def step(x):
                model.backward(model(x).sum())

            step(torch.ones(4, 4))

        train()  # nobody holds the model afterwards
        during = [thread.name for thread in threading.enumerate() if thread.name.startswith("smp-pipeline")]
        smp.shutdown()
        for thread in threading.enumerate():
            if thread.name.startswith("smp-"):
                thread.join(10)  # the other rank may not have said goodbye yet
        return during, [thread.name for thread in threading.enumerate() if thread.name.startswith("smp-")]

    for during, after in ranks(threads, 2, config={"pipeline_parallel_degree": 2, "ddp": True}):
        assert during
        assert after == []


#: A thread calls C++ twice while the script ends, and returns from the second call while the interpreter is finalized.
_CALLS_TWICE = """
import atexit, sys, threading, time
atexit.register(time.sleep, 0.3)  # the last of the handlers
from datetime import timedelta
import torch.distributed as dist
from smp_runtime.pipeline.transport.native_calls import start_call

class Late:
    def __del__(self):
        time.sleep(1.5)

def wait():
    try:
        dist.HashStore().wait(["absent"], timedelta(seconds=0.5))
    except RuntimeError:
        pass

def end_both():
    for _ in range(2):
        if call := start_call(wait, "call"):
            call.join()

threading.Thread(target=end_both, daemon=True).start()
sys.modules["late"] = Late()
"""


def test_no_call_of_another_thread_starts_while_the_interpreter_is_finalized():
    done = subprocess.run([sys.executable, "-c", _CALLS_TWICE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_closing_waits_until_the_receiver_thread_has_freed_all_groups():
    closed, begun = [], threading.Event()

    class Channel:
        quiet_seconds = 0.0

        def close(self, seconds):
            begun.set()
            time.sleep(0.2)
            closed.append(self)

    one, other = socket.socketpair()
    with one, other:
        peer = Peer(1, 1, one, [Channel()], [Channel()])
        peer.reading = False
        receiver = threading.Thread(target=peer.free_channels, args=(0.0,))
        receiver.start()
        assert begun.wait(60)
        peer.free_channels(60.0)
        assert len(closed) == 2
        receiver.join()
