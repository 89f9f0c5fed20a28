"""Object messages between more ranks than there are processes in tests: threads, and queues between them."""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter, defaultdict

import pytest

from smp_runtime.comm.control import ControlPlane


class _Queues:
    """What the ranks of one job share: a queue for every pair and channel, and how often each rank has sent."""

    def __init__(self, size):
        self.size = size
        self.between = defaultdict(queue.SimpleQueue)
        self.lock = threading.Lock()
        self.sent = Counter()

    def queue(self, *way):
        with self.lock:
            return self.between[way]


class _Carrier:
    seal = None

    def __init__(self, queues, rank):
        self._queues = queues
        self.rank, self.size = rank, queues.size

    def send(self, payload, dest, channel):
        self._queues.sent[self.rank] += 1  # a rank has a thread of its own
        self._queues.queue(self.rank, dest, channel).put(payload)

    def receive(self, source, channel):
        return self._queues.queue(source, self.rank, channel).get(timeout=20)


@pytest.mark.parametrize("size", [33, 64, 100])
def test_a_large_group_gathers_without_one_rank_that_sends_to_all(size):
    queues, found = _Queues(2 * size), {}
    members = [2 * position for position in reversed(range(size))]

    def run(rank):
        control = ControlPlane(_Carrier(queues, rank))
        gathered = control.allgather({"from": rank}, members)
        found[rank] = gathered, control.broadcast(rank, members)
        control.barrier(members)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {rank: answer for rank, (_, answer) in found.items()} == dict.fromkeys(members, members[0])
    for gathered, _ in found.values():
        assert [payload["from"] for payload in gathered] == members
    assert max(queues.sent.values()) <= 3 * math.ceil(math.log2(size))
    assert sum(queues.sent.values()) == 3 * 2 * (size - 1)
