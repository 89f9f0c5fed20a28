"""A pool of rank processes that many tests share, since starting one costs seconds.

Each case gets some of the pool's processes as its ranks, with a control plane of its own (as under ``torchrun``)
and a fresh session. A pool that saw a failure is thrown away, so no case inherits another's wreck.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch.distributed as dist

from smp_launch.watch.states import state_of

#: Of the pool that tests share.
MOST_RANKS = 4
#: Times of its time limit that a case may take while its ranks want processors; seconds for which it is seen whether they do, and
#: looks in these.
_LONGEST, _LOOK_SECONDS, _LOOKS = 4.0, 1.0, 10
#: What scripts reach ``smp.init`` by, with all that waits for it.
_INIT = "smdistributed.modelparallel.torch.session_mod"


class RankFailed(AssertionError):
    """One or more ranks raised, died or did not answer in time."""


class RankPool:
    """Processes that run functions as ranks of small jobs.

    Args:
        size: most ranks that a case can have.
        imports: what the ranks need beside PyTorch and the runtime. It is imported once for all of them if this is the first
            pool of its process.
    """

    def __init__(self, size: int, imports: Sequence[str] = ()) -> None:
        # The store lives here, on a port that the system picks, and outlives every case.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        # Forked from a server that has imported PyTorch, for which each would need three seconds of its processor.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [
                "support.ranks.without_collections",
                "torch._dynamo",
                _INIT,
                "smp_runtime.model.distributed_model",
                "support.ranks.rank_pool",
                *imports,
            ]
        )
        self._ranks = []
        self._ready = 0
        self._case = 0
        for index in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, index, self._store.port, dict(os.environ)), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    @property
    def size(self) -> int:
        """Most ranks that a case can have."""
        return len(self._ranks)

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        config: dict[str, Any] | None = None,
        init: bool = True,
        env: dict[str, str] | None = None,
        timeout: float = 60.0,
        process_mode: bool = False,
    ) -> list[Any]:
        """Run ``function(*args)`` on every rank after ``smp.init(config)``; returns the results in rank order.

        Args:
            process_mode: whether the ranks' environment is that of process mode, in which they share memory. Otherwise it is as
                under ``torchrun``, and they communicate as ranks of several hosts or of GPUs do: over ``torch.distributed``.

        Raises:
            RankFailed: with the traceback of the first rank that failed.
            ValueError: the pool has fewer ranks.
        """
        if world_size > len(self._ranks):
            raise ValueError(f"{world_size} ranks were asked for, and the pool has {len(self._ranks)}")
        self._case += 1
        # Test modules cannot be imported by the ranks, so their functions travel with their code.
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        task = cloudpickle.dumps((function, args, world_size, config, init, env or {}, self._case, process_mode))
        members = self._ranks[:world_size]
        for _, pipe in members[self._ready :]:
            pipe.recv_bytes()  # it has started, which is not counted in the case's time
        self._ready = max(self._ready, world_size)
        for _, pipe in members:
            pipe.send_bytes(task)
        began = time.monotonic()
        deadline = began + timeout
        results: dict[int, Any] = {}
        while len(results) < world_size:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(members) if rank not in results}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() - began < _LONGEST * timeout and self._want_processors(world_size):
                continue
            if not ready:
                raise RankFailed(f"ranks {sorted(waiting.values())} of {world_size} gave no result within {timeout} s")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    ok, value = cloudpickle.loads(pipe.recv_bytes())
                except EOFError:
                    raise RankFailed(f"rank {rank} of {world_size} died") from None
                if not ok:
                    raise RankFailed(f"rank {rank} of {world_size} raised:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(world_size)]

    def _want_processors(self, world_size: int) -> bool:
        """Return whether ranks compute, or wait for a processor of a busy machine, most of the time, as those that hang do not."""
        pids = [process.pid for process, _ in self._ranks[:world_size] if process.pid is not None]
        before, began = [state_of(pid) for pid in pids], time.monotonic()
        runnable = 0
        for _ in range(_LOOKS):
            time.sleep(_LOOK_SECONDS / _LOOKS)
            runnable += any(map(_is_runnable, pids))
        seconds = time.monotonic() - began
        after = [state_of(pid) for pid in pids]
        wanted = sum(b.processor_seconds - a.processor_seconds for a, b in zip(before, after, strict=True))
        # The system counts a wait when it is over, which may be later than this.
        return wanted > seconds / 2 or runnable > _LOOKS / 2

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join(10)


def _is_runnable(pid: int) -> bool:
    """Return whether a thread of a process runs, or waits for a processor only."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            if (task / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"R":
                return True
    return False


def _serve(pipe: Any, rank: int, port: int, environ: dict[str, str]) -> None:
    os.environ.clear()  # the server's is that of the first pool
    os.environ.update(
        environ,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TORCHELASTIC_USE_AGENT_STORE="True",
        SMP_TIMEOUT_SECONDS="60",
    )
    import torch

    torch.set_num_threads(1)
    session = importlib.import_module(_INIT)

    gc.freeze()  # what every case needs is not looked at when a case's rest is collected
    gc.enable()
    modules = len(sys.modules)
    with contextlib.suppress(ConnectionError):  # a pool that ends already
        pipe.send_bytes(b"ready")
    while True:
        try:
            function, args, world_size, config, init, env, case, process_mode = cloudpickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        before = dict(os.environ)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), TORCHELASTIC_RESTART_COUNT=str(case), **env)
        if process_mode:
            os.environ.update(SMP_PROCESS_MODE="1", SMP_RANK=str(rank), SMP_WORLD_SIZE=str(world_size))
        try:
            if init:
                session.init(config)
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        # Answered before leaving the session, which may wait for ranks that failed.
        pipe.send_bytes(cloudpickle.dumps(answer))
        if answer[0]:
            session.shutdown()
        os.environ.clear()
        os.environ.update(before)
        # Models lie in reference cycles, and with them process groups, whose threads would go on asking their closed
        # connections.
        del function, args, answer
        gc.collect()
        # What a case has imported is not looked at after each later one. Where it has imported nothing, something that a thread of
        # it still holds would stay for ever.
        if len(sys.modules) > modules:
            gc.freeze()
            modules = len(sys.modules)
