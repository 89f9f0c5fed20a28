"""The gather in two phases, between hosts and then inside each: the second begins although no rank waits for it."""

from __future__ import annotations

import os
import threading
import types

import pytest
import torch

from smp_runtime.sharding import all_gather

#: Seconds until a phase must have begun on a busy machine; normally it begins at once.
PATIENCE = 60.0
CONFIG = {"ddp": True, "sharded_data_parallel_degree": 4}


def _on_two_hosts():
    """Put this rank on its host, of two; call it before ``smp.init``."""
    os.environ["SMP_HOST"] = f"algo-{int(os.environ['RANK']) * 2 // int(os.environ['WORLD_SIZE'])}"


class _Watched:
    """The collectives of a job; ``begun[ranks]`` counts the gathers that have begun over them."""

    def __init__(self, inner):
        self._inner = inner
        self.begun = {}
        self.changed = threading.Condition()

    def all_gather(self, full, shard, group):
        work = self._inner.all_gather(full, shard, group)
        members = tuple(torch.distributed.get_process_group_ranks(group))
        with self.changed:
            self.begun[members] = self.begun.get(members, 0) + 1
            self.changed.notify_all()
        return work

    def count(self, kind):
        return sum(
            number for members, number in self.begun.items() if (members[1] - members[0] == 1) == (kind == "inside")
        )


def _gather(turns):
    """Start gathers, wait until their second phases have begun, and only then wait for them: the last one first."""
    from smp_runtime.job import session

    ranks = session.current_session().ranks
    watched = _Watched(ranks.collectives)
    names = ("rank", "device", "backend", "members", "rank_in", "groups", "control", "topology")
    seen = types.SimpleNamespace(**{name: getattr(ranks, name) for name in names}, collectives=watched)
    gathering = all_gather.make_gathering(seen, hierarchical=True)
    assert type(gathering) is all_gather.HierarchicalGathering
    shards = [torch.full((8,), 10.0 * turn + gathering.position, device=ranks.device) for turn in range(turns)]
    fulls = [torch.empty(32, device=ranks.device) for _ in shards]
    works = [gathering.start(full, shard) for full, shard in zip(fulls, shards, strict=True)]
    at_once = watched.count("inside")
    with watched.changed:
        has_begun = watched.changed.wait_for(lambda: watched.count("inside") == turns, PATIENCE)
    for work in reversed(works):
        work.wait()
    return at_once, has_begun, watched.count("across"), [full.cpu().view(4, 8)[:, 0].tolist() for full in fulls]


EXPECTED = [[10.0 * turn + position for position in range(4)] for turn in range(3)]


@pytest.mark.both_transports
def test_a_thread_begins_it_where_transports_have_no_streams(ranks):
    def run():
        from smp_runtime.job import session

        _on_two_hosts()
        try:
            session.init(CONFIG)
            return _gather(3)
        finally:
            session.shutdown()
            del os.environ["SMP_HOST"]

    for _, has_begun, across, found in ranks(run, 4, init=False):
        assert has_begun
        assert across == 3
        assert found == EXPECTED


@pytest.mark.parametrize("seed", [1, 2])
def test_nccl_has_both_in_its_queues_at_once(ranks, seed):
    def run():
        from support.ranks import emulated

        _on_two_hosts()
        try:
            return emulated.on_devices(seed, CONFIG, lambda: {"found": _gather(3)})
        finally:
            del os.environ["SMP_HOST"]

    for result in ranks(run, 4, init=False):
        at_once, has_begun, across, found = result["found"]
        assert (at_once, has_begun, across) == (3, True, 3)
        assert found == EXPECTED
        assert not [line for _, line in result["waits"] if "all_gather" in line]


def _lost(words):
    """The others of a host hear what its rank heard from the other host, and nothing more is sent."""
    begun = []

    class Fails:
        def wait(self):
            raise RuntimeError(words)

    phases = all_gather.ThreadPhases(torch.device("cpu"))
    works = [phases.start(Fails, lambda: begun.append("second")) for _ in range(2)]
    return phases, works, begun


def test_an_error_of_the_first_phase_is_raised_by_who_waits():
    phases, works, begun = _lost("Connection closed by peer")
    for work in works:
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            work.wait()
    assert begun == []
    phases.close()


def test_the_wait_has_a_deadline(monkeypatch):
    from smp_runtime.errors import SMPRuntimeError

    ends = threading.Event()
    monkeypatch.setattr(all_gather, "timeout_seconds", lambda: 0.05)
    phases = all_gather.ThreadPhases(torch.device("cpu"))
    work = phases.start(lambda: types.SimpleNamespace(wait=ends.wait), lambda: None)
    with pytest.raises(SMPRuntimeError, match="has not ended within 0.1 s"):
        work.wait()
    ends.set()
    phases.close()


def test_the_thread_ends_with_the_job(ranks):
    def run():
        from smp_runtime.job import session

        _on_two_hosts()
        try:
            session.init(CONFIG)
            _gather(1)
            thread = next(thread for thread in threading.enumerate() if thread.name == "smp-gather")
            session.shutdown()
            thread.join(PATIENCE)
            return thread.is_alive()
        finally:
            del os.environ["SMP_HOST"]

    assert ranks(run, 4, init=False) == [False] * 4


def test_the_record_shows_that_the_rank_waits_not_its_thread():
    from smp_runtime.comm.collective_log import _LoggedWork

    recorded = []
    notes = types.SimpleNamespace(
        begin_wait=lambda position: recorded.append(("begin", position, threading.current_thread().name)),
        end_wait=lambda position: recorded.append(("end", position, threading.current_thread().name)),
    )
    first = _LoggedWork(lambda: types.SimpleNamespace(wait=lambda: None), notes, 7)
    phases = all_gather.ThreadPhases(torch.device("cpu"))
    work = phases.start(lambda: first, lambda: types.SimpleNamespace(wait=lambda: None))
    work.wait()
    phases.close()
    assert recorded == [("begin", 7, "MainThread"), ("end", 7, "MainThread")]
