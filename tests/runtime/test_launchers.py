"""Joining a job, whatever has started it: the ranks of SLURM, of another's process group, and ranks that belong to two launches."""

from __future__ import annotations

import os
import socket
import types

import pytest
import torch
from support.models.models import TiedNet, token_batches, token_loss
from support.training.reference import Alone, divided

from smp_runtime.comm import control
from smp_runtime.comm import rendezvous as meeting_place
from smp_runtime.comm.control_transports import StoreTransport
from smp_runtime.errors import SMPRuntimeError

STEPS, BATCH, RATE = 3, 8, 0.5


def _train_under_slurm():
    """Losses and weights of pp 2 × dp 2, where nothing but srun's variables says which rank this is."""
    import smdistributed.modelparallel.torch as smp

    rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    os.environ.update(SLURM_PROCID=rank, SLURM_STEP_NUM_TASKS=size, SLURM_STEP_ID="0", SLURM_JOB_ID="4711")
    smp.init({"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2})
    torch.manual_seed(0)
    model = smp.DistributedModel(TiedNet())

    @smp.step
    def step(ids, targets):
        loss = token_loss(model, ids, targets)
        model.backward(loss)
        return loss

    losses = []
    for batch in token_batches(0, STEPS, BATCH):
        mine = (tensor.chunk(smp.dp_size())[smp.dp_rank()] for tensor in batch)
        model.zero_grad()
        losses.append(float(step(*mine).reduce_mean()))
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter -= RATE * parameter.grad
    means = [sum(each) / smp.dp_size() for each in zip(*smp.allgather(losses, smp.DP_GROUP), strict=True)]
    return smp.pp_size(), smp.dp_size(), means, model.state_dict()


def test_tasks_of_srun_train_as_one_process(ranks):
    torch.manual_seed(0)
    alone = Alone(TiedNet(), lambda parameters: torch.optim.SGD(parameters, lr=RATE))
    for batch in token_batches(0, STEPS, BATCH):
        alone.step(divided(batch, microbatches=2, replicas=2))
    for pipeline, data, losses, weights in ranks(_train_under_slurm, 4, init=False):
        assert (pipeline, data) == (2, 2)
        assert losses == pytest.approx(alone.losses, abs=1e-5)
        for name, weight in alone.weights.items():
            torch.testing.assert_close(weights[name], weight.detach(), atol=1e-5, rtol=1e-5)


def _join_process_group(meeting):
    import torch.distributed as dist

    import smdistributed.modelparallel.torch as smp

    rank, size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    # What a shell may have left over says nothing to ranks that have met.
    os.environ["RANK"] = "7"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        smp.init({"ddp": True})
        found = smp.rank(), smp.size(), smp.allgather(smp.rank(), smp.WORLD)
        smp.shutdown()
        return found
    finally:
        dist.destroy_process_group()


def test_ranks_of_a_process_group_need_no_variables(ranks, tmp_path):
    joined = ranks(_join_process_group, 2, str(tmp_path / "meeting"), init=False)
    assert joined == [(0, 2, [0, 1]), (1, 2, [0, 1])]


def _join(own):
    """How a rank joins whose variables are ``own[rank]``; nobody waits for another."""
    rank = int(os.environ["RANK"])
    place = int(own[rank]["RANK"]), int(own[rank]["WORLD_SIZE"])
    try:
        StoreTransport.at_meeting_place(*place, os.environ)
    except SMPRuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["two processes are rank 0 of 2", "the same RANK was given twice"]),
        ({"RANK": "1", "WORLD_SIZE": "4"}, ["to the same store is one of", "MASTER_PORT", "the same WORLD_SIZE"]),
    ],
)
def test_ranks_of_two_launches_are_told_apart(ranks, second, words):
    said = ranks(_join, 2, [{"RANK": "0", "WORLD_SIZE": "2"}, second], init=False)
    assert sorted(map(bool, said)) == [False, True]
    for word in words:
        assert word in "".join(said)


@pytest.fixture
def meeting(monkeypatch):
    """``meeting(port)``: ranks meet there, for half a second; gives the environment."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def at(port):
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SMP_TIMEOUT_SECONDS": "0.5"}.items():
            monkeypatch.setenv(name, value)
        return os.environ

    return at


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _joined_thrice():
    import time

    import smdistributed.modelparallel.torch as smp

    sums = []
    for count in range(3):
        smp.init({"ddp": True})
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        sums.append(total.item())
        if smp.rank() == count % 2:
            time.sleep(0.1)  # the other one joins again before this rank has left
        smp.shutdown()
    return sums


def test_a_process_joins_again_where_rank_0_keeps_the_store(ranks):
    place = {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert ranks(_joined_thrice, 2, init=False, env=place) == [[2.0] * 3] * 2


def test_nobody_keeps_the_store(meeting):
    port = free_port()
    with pytest.raises(
        SMPRuntimeError,
        match=rf"rank 1 of 2 waited 0.5 s for the store of the job at 127.0.0.1:{port}.*rank 0 keeps it",
    ):
        StoreTransport.at_meeting_place(1, 2, meeting(port))


def test_nobody_comes_to_the_store(meeting):
    with pytest.raises(
        SMPRuntimeError, match=r"rank 0 of 2 waited 0.5 s for the other ranks.*MASTER_ADDR and MASTER_PORT"
    ):
        StoreTransport.at_meeting_place(0, 2, meeting(free_port()))


def test_the_port_is_taken(meeting):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(SMPRuntimeError, match=r"rank 0 of 2 cannot keep the store.*a MASTER_PORT of its own"):
            StoreTransport.at_meeting_place(0, 2, meeting(taken.getsockname()[1]))


def test_an_mpi_that_does_not_know_the_launcher(monkeypatch):
    monkeypatch.setattr(control, "MpiTransport", lambda: types.SimpleNamespace(rank=0, size=1))
    with pytest.raises(SMPRuntimeError, match=r"MPI says that this is rank 0 of 1, but PMI_RANK=1 and PMI_SIZE=4"):
        control.connect({"PMI_RANK": "1", "PMI_SIZE": "4"})


def test_the_first_address_that_answers_is_called(monkeypatch):
    assert meeting_place.callable_addresses({"MASTER_ADDR": "node1"}) == ["node1"]
    monkeypatch.setattr(meeting_place, "list_addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.5"})
    assert meeting_place.callable_addresses({}) == [socket.gethostname(), "10.0.0.5"]
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert meeting_place.callable_addresses({}) == ["10.0.0.5"]
    with socket.socket() as listening:
        listening.bind(("127.0.0.2", 0))
        listening.listen()
        port = listening.getsockname()[1]
        # The first is this host, where nothing listens.
        assert meeting_place.find_answering(["127.0.0.1", "127.0.0.2"], port) == "127.0.0.2"
        assert meeting_place.find_answering(["127.0.0.1", "127.0.0.3"], port) == "127.0.0.1"
        assert meeting_place.find_answering(["nobody asks"], port) == "nobody asks"
