"""One process for each kind of rank answers for all ranks."""

import threading

import pytest

from smp_config import Coordinates, Group, Topology
from smp_runtime.comm.authentication import Seal
from smp_runtime.comm.control import Arrival
from smp_runtime.errors import SMPUserError
from smp_tools.rehearsal.control import Kinds, RehearsedControl
from smp_tools.rehearsal.message_log import MessageLog


class Wire:
    """Carries messages between threads of this process."""

    def __init__(self, rank, size, boxes):
        self.rank, self.size, self.call = rank, size, ""
        self._boxes = boxes

    seal: Seal | None = None

    def send(self, payload, dest, channel):
        with self._boxes["changed"]:
            self._boxes.setdefault((self.rank, dest, channel), []).append(payload)
            self._boxes["changed"].notify_all()

    def receive(self, source, channel):
        key = (source, self.rank, channel)
        with self._boxes["changed"]:
            assert self._boxes["changed"].wait_for(lambda: self._boxes.get(key), 10)
            return self._boxes[key].pop(0)

    def look(self, other, *, asks):
        return None

    def went_on(self):
        pass

    def close(self, left):
        pass


def controls(topology, per_host):
    boxes = {"changed": threading.Condition()}
    kinds = Kinds(topology, per_host)
    wires = [Wire(kind, topology.pipeline, boxes) for kind in range(topology.pipeline)]
    return [RehearsedControl(wire, kinds, topology.world_size) for wire in wires], kinds


def together(*calls):
    """What functions give that wait for one another."""
    found = [None] * len(calls)

    def work(number, call):
        found[number] = call()

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return found


def test_the_first_rank_of_each_stage_stands_for_all_of_it():
    topology = Topology(32, pipeline=4, tensor=2)
    kinds = Kinds(topology, 8)
    assert kinds.representatives == [topology.group_of(Group.PP, 0)[stage] for stage in range(4)]
    assert all(kinds.kind_of(rank) == topology.coordinates(rank).pp for rank in range(32))
    assert kinds.stands_for(0) == 8
    assert kinds.hosts_of([0, 7]) == 1
    assert kinds.hosts_of([0, 8, 31]) == 3


def test_an_allgather_over_all_ranks_asks_the_processes_that_are_there():
    topology = Topology(1024, pipeline=2)
    (first, second), _ = controls(topology, 8)
    everyone = list(range(1024))
    found = together(lambda: first.allgather("a", everyone), lambda: second.allgather("b", everyone))
    expected = ["ab"[topology.coordinates(rank).pp] for rank in everyone]
    assert found == [expected, expected]


def test_a_group_of_one_stage_needs_no_message():
    topology = Topology(16, pipeline=2)
    (first, _), _ = controls(topology, 8)
    members = topology.group_of(Group.DP, first.rank)
    assert first.allgather("a", members) == ["a"] * 8
    assert first.broadcast("a", members) == "a"
    assert first.gather("a", members) == ["a"] * 8


def test_what_the_first_stage_says_is_heard_by_the_last():
    topology = Topology(8, pipeline=4)
    found, _ = controls(topology, 8)
    members = topology.group_of(Group.PP, 0)
    calls = [lambda one=one, kind=kind: one.broadcast(kind, members) for kind, one in enumerate(found)]
    assert together(*calls) == [0, 0, 0, 0]


def test_every_rank_arrives_from_its_own_host():
    topology = Topology(32)
    (only,), _ = controls(topology, 8)
    arrived = only.arrivals(Arrival("here", "{}", "ml.p4d.24xlarge", []))
    assert [one.host for one in arrived] == [f"algo-{rank // 8 + 1}" for rank in range(32)]
    assert {one.instance for one in arrived} == {"ml.p4d.24xlarge"}


def test_messages_inside_a_stage_come_back_and_others_go_over():
    topology = Topology(8, pipeline=2)
    (first, second), kinds = controls(topology, 8)
    neighbour = topology.group_of(Group.DP, first.rank)[1]
    first.send("to my own", neighbour)
    assert first.receive(neighbour) == "to my own"
    first.send("over", topology.group_of(Group.DP, second.rank)[-1])
    assert second.receive(first.rank) == "over"
    with pytest.raises(SMPUserError, match=r"rank 0 receives from rank \d.* use smp.broadcast"):
        first.receive(neighbour)
    assert kinds.kind_of(neighbour) == 0


def test_the_last_ranks_hear_what_the_first_have_said(tmp_path):
    topology = Topology(8, pipeline=2, tensor=2)
    wires = {"changed": threading.Condition()}
    first, last = Kinds(topology, 8), Kinds(topology, 8, last=True)
    assert first.others == last.representatives == [topology.rank_at(Coordinates(stage, 1, 1)) for stage in range(2)]
    everyone, heard = list(range(8)), [MessageLog(), MessageLog()]
    earlier = [RehearsedControl(Wire(stage, 2, wires), first, 8, heard=heard[stage]) for stage in range(2)]
    together(lambda: earlier[0].allgather("a", everyone), lambda: earlier[1].allgather("b", everyone))
    earlier[0].send("only you", last.representatives[1])
    for stage in range(2):
        heard[stage].leave(first.representatives[stage], tmp_path)
    later = [
        RehearsedControl(Wire(stage, 2, wires), last, 8, said=MessageLog(last.others, tmp_path)) for stage in range(2)
    ]
    found = together(lambda: later[0].allgather("c", everyone), lambda: later[1].allgather("d", everyone))
    expected = ["cd"[topology.coordinates(rank).pp] for rank in everyone]
    for rank, said in zip(first.representatives, "ab", strict=True):
        expected[rank] = said
    assert found == [expected, expected]
    assert later[1].receive(first.representatives[0]) == "only you"
    later[0].send("too late", first.representatives[1])  # nobody waits for it


def test_a_broadcast_to_all_reaches_each_process_once():
    topology = Topology(64, pipeline=2)
    (first, second), kinds = controls(topology, 8)

    def sends():
        with first.doing("smp.broadcast"):
            for rank in range(1, 64):
                first.send(rank, rank)

    assert together(sends, lambda: second.receive(0)) == [None, kinds.representatives[1]]
    sent = [len(box) for key, box in first._carrier._inner._boxes.items() if key != "changed"]
    assert sent == [0]


def test_tensors_that_ranks_tell_each_other_travel_and_files_stay_empty(tmp_path, monkeypatch):
    import io
    import pickle

    import torch

    from smp_runtime.errors import SMPRuntimeError
    from smp_tools.rehearsal import rank

    monkeypatch.setattr(torch, "save", rank._save_nothing)
    told = pickle.loads(pickle.dumps({"a": torch.arange(5.0)}))
    assert told["a"].tolist() == [0, 1, 2, 3, 4]
    file = io.BytesIO()
    torch.save({"a": torch.ones(3)}, file)
    file.seek(0)
    assert torch.load(file) is None
    with pytest.raises(SMPRuntimeError, match="a tensor of 67,108,868 bytes is handed to other ranks"):
        pickle.dumps(torch.empty(2**24 + 1))
