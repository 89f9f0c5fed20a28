"""Process groups beside those that a script has made itself, and how a rank leaves them."""

from __future__ import annotations

import sys
import threading
import types
from datetime import timedelta

import pytest
import torch
from torch import nn

from smp_config import Group, Topology
from smp_runtime.comm import groups
from smp_runtime.comm.groups import ProcessGroups, has_backends
from smp_runtime.job import session as sessions


@pytest.mark.parametrize(
    ("backends", "device", "is_served"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", True),
        ("cuda:nccl", "cuda", False),
        ("cpu:gloo,cuda:gloo", "cuda", True),
        ("cpu:gloo", "cuda", False),
        ("cpu:gloo", "cpu", True),
        ("cpu:mpi,cuda:mpi", "cpu", True),
    ],
)
def test_what_a_group_serves(backends, device, is_served):
    assert has_backends(backends, {"cpu", device}) is is_served


def test_a_script_may_have_started_groups_without_a_backend_for_the_cpu(ranks):
    def run():
        import torch.distributed as dist

        import smdistributed.modelparallel.torch as smp
        from smp_config import Group

        # As init_process_group("nccl") does on a GPU: tensors of the CPU have no backend.
        dist.init_process_group("cuda:gloo")
        try:
            session = smp.init({"ddp": True})
            assert session.groups.group(Group.WORLD) is not dist.group.WORLD
            torch.manual_seed(smp.rank())
            model = smp.DistributedModel(nn.Linear(2, 1))

            @smp.step
            def step(x):
                model.backward(model(x).sum())

            step(torch.full((1, 2), float(smp.rank())))
            smp.shutdown()
            assert dist.is_initialized()
            return model.module.weight.detach(), model.module.weight.grad
        finally:
            dist.destroy_process_group()

    for weight, gradient in (results := ranks(run, 2, init=False)):
        assert torch.equal(weight, results[0][0])
        assert gradient.tolist() == [[0.5, 0.5]]


@pytest.fixture
def on_nccl(solo, monkeypatch):
    """A session whose process groups look like those of a GPU; gives it and what is done to them."""
    import torch.distributed as dist

    done = []
    destroy = dist.destroy_process_group
    session = solo({})
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(session.groups, "_device", torch.device("cuda", 0))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(groups, "abort_process_groups", lambda: done.append("aborted"))
    monkeypatch.setattr("signal.getitimer", lambda *_: (0.0, 0.0))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("signal.setitimer", lambda *_: done.append("alarm"))
    yield session, done
    if dist.is_initialized():
        destroy()


def test_an_uncaught_exception_aborts_the_calls_of_a_gpu(on_nccl):
    session, done = on_nccl
    assert not session.has_failed
    error = ValueError("nobody catches it")
    sys.excepthook(type(error), error, None)
    sessions.shutdown()
    assert done == ["aborted"]


def test_an_abort_that_does_not_end_leaves_the_process_to_the_system(on_nccl, monkeypatch):

    session, done = on_nccl
    ends = threading.Event()
    monkeypatch.setattr(groups, "abort_process_groups", ends.wait)
    monkeypatch.setattr(groups, "ABORT_SECONDS", 0.05)
    session.has_failed = True
    sessions.shutdown()
    ends.set()
    assert done == ["alarm"]


def test_without_a_failure_or_on_gloo_groups_are_taken_down_in_good_order(on_nccl, monkeypatch):
    session, done = on_nccl
    session.groups.close()
    monkeypatch.setattr(session.groups, "_device", torch.device("cpu"))
    session.groups.abandon()
    assert done == ["destroyed", "destroyed"]


def test_the_hook_of_the_script_sees_the_exception_and_ours_goes_with_the_session(solo, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *failure: seen.append(failure))
    session, error = solo({}), ValueError("nobody catches it")
    sys.excepthook(ValueError, error, None)
    assert seen == [(ValueError, error, None)]
    assert session.has_failed
    assert sys.excepthook.__module__ == sessions.__name__
    sessions.shutdown()
    assert sys.excepthook.__module__ != sessions.__name__


def test_groups_keep_away_from_nccl_where_gloo_was_chosen(solo, monkeypatch):
    import torch.distributed as dist

    session = solo({})
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    made = [
        ProcessGroups(session.control, session.topology, backend, device=torch.device("cuda", 0))
        for backend in ("cpu:gloo,cuda:nccl", "gloo")
    ]
    assert [found.group(Group.WORLD) is dist.group.WORLD for found in made] == [True, False]


def test_groups_between_hosts_have_the_jobs_deadline(monkeypatch):
    import torch.distributed as dist

    from smp_runtime.sharding import all_gather as hosts

    made = []
    monkeypatch.setenv("SMP_TIMEOUT_SECONDS", "77")
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append((list(ranks), options["timeout"])))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "fake")
    names = ["a", "a", "b", "b"]
    session = types.SimpleNamespace(
        rank=0,
        device=torch.device("cpu"),
        backend="gloo",
        collectives=None,
        members=lambda group: [0, 1, 2, 3],
        rank_in=lambda group: 0,
        groups=types.SimpleNamespace(group=lambda group: None),
        control=types.SimpleNamespace(size=4, allgather=lambda value, ranks: names),
        topology=types.SimpleNamespace(groups=lambda group: [[0, 1, 2, 3]]),
    )
    hosts.make_gathering(session, hierarchical=True)
    assert made == [(ranks, timedelta(seconds=77)) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]


@pytest.mark.parametrize(
    ("degrees", "named", "own"),
    [({"sharded": 64}, 90, 4), ({"tensor": 8, "sharded": 32}, 506, 6), ({"tensor": 8, "pipeline": 4}, 662, 7)],
)
def test_a_rank_of_many_is_in_few_groups(degrees, named, own):
    """Of 1,536 ranks; there are up to 2,197 distinct groups, most of one rank."""
    topology = Topology(1536, **degrees)
    for rank in (0, 777, 1535):
        found = groups.groups_to_name(topology, rank)
        assert len(found) == len(set(found)) == named
        members = {tuple(topology.group_of(kind, rank)) for kind in Group}
        assert {ranks for ranks in found if rank in ranks} == members
        assert len(members) == own
        assert [ranks for ranks in found if len(ranks) > 1] == [
            ranks for ranks in groups.groups_to_name(topology, 3) if len(ranks) > 1
        ]
