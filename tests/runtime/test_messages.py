"""Object messages over the store; the same over MPI is in tests/jobs."""

from __future__ import annotations

import sys
import time

import pytest


def _exchange():
    """Every message kind in every group of a 2-stage, 2-replica job; runs on each of four ranks."""
    from smp_config import Topology
    from smp_runtime.comm.control import connect
    from smp_runtime.comm.messages import CommGroup, Messages, RankType
    from smp_runtime.errors import SMPUserError

    control = connect()
    messages = Messages(control, Topology(4, pipeline=2))
    rank = control.rank
    seen = {}
    for group in CommGroup:
        seen[group.name] = messages.allgather({"from": rank}, group)
        messages.barrier(group)
    # Stage 0 of each replica tells stage 1; ranks 0,1 and 2,3 are the replicas.
    if rank % 2 == 0:
        messages.send(("activation", rank), 1, RankType.PP_RANK)
    else:
        seen["pp"] = messages.recv_from(0, RankType.PP_RANK)
    # Rank 2 broadcasts to the world, the others receive.
    if rank == 2:
        messages.broadcast("hello" * 100_000, CommGroup.WORLD)
    else:
        seen["hello"] = len(messages.recv_from(2, RankType.WORLD_RANK))
    with pytest.raises(SMPUserError, match="ranks 0 to 1"):
        messages.send(1, 2, RankType.DP_RANK)
    with pytest.raises(SMPUserError, match="itself"):
        messages.send(1, rank, RankType.WORLD_RANK)
    with pytest.raises(SMPUserError, match="CommGroup"):
        messages.allgather(1, "WORLD")
    return seen


def test_every_kind_of_message(ranks):
    results = ranks(_exchange, 4, init=False)
    assert [m["from"] for m in results[3]["WORLD"]] == [0, 1, 2, 3]
    assert [m["from"] for m in results[3]["MP_GROUP"]] == [2, 3]
    assert [m["from"] for m in results[3]["DP_GROUP"]] == [1, 3]
    assert [m["from"] for m in results[1]["RDP_GROUP"]] == [1, 3]
    assert [m["from"] for m in results[1]["TP_GROUP"]] == [1]
    assert results[3]["pp"] == ("activation", 2)
    assert results[0]["hello"] == 500_000
    assert "hello" not in results[2]


def _exchange_long_values(part):
    import torch

    import smdistributed.modelparallel.torch as smp

    generator = torch.Generator().manual_seed(smp.rank())
    # Around the length of a part, and longer than PyTorch's store takes in one value.
    sizes = (part - 200, part, 2 * part, 9 * 2**20 + 1)
    mine = [torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8) for size in sizes]
    everything = smp.allgather(mine, smp.WORLD)
    smp.broadcast(mine[-1], smp.WORLD) if smp.rank() == 0 else None
    first = mine[-1] if smp.rank() == 0 else smp.recv_from(0, smp.RankType.WORLD_RANK)
    return [[(value.numel(), int(value.sum())) for value in values] for values in everything], int(first.sum())


@pytest.mark.parametrize("environment", [{}, {"LOCAL_WORLD_SIZE": "1"}], ids=["with a secret", "plain data"])
def test_values_of_any_length_arrive(ranks, environment):
    from smp_runtime.comm.control_transports import _PART_BYTES

    (seen, first), (seen_too, first_too) = ranks(_exchange_long_values, 2, _PART_BYTES, env=environment)
    assert seen == seen_too
    assert [size for size, _ in seen[1]] == [_PART_BYTES - 200, _PART_BYTES, 2 * _PART_BYTES, 9 * 2**20 + 1]
    assert seen[0] != seen[1]
    assert first == first_too == seen[0][-1][1]


def test_send_returns_only_when_received(ranks):
    def run():
        import time

        import smdistributed.modelparallel.torch as smp

        if smp.rank() == 0:
            start = time.monotonic()
            smp.send("x", 1, smp.RankType.WORLD_RANK)
            return time.monotonic() - start
        time.sleep(0.5)  # the receiver is late on purpose
        return smp.recv_from(0, smp.RankType.WORLD_RANK)

    waited, received = ranks(run, 2)
    assert received == "x"
    assert waited >= 0.4


def _out_of_step():
    """Rank 0 waits for rank 1 to its deadline, and ends; rank 1 waits elsewhere meanwhile."""
    import os

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import SMPRuntimeError

    os.environ["SMP_TIMEOUT_SECONDS"] = "1" if smp.rank() == 0 else "50"
    with pytest.raises(SMPRuntimeError) as told:
        smp.recv_from(1, smp.RankType.WORLD_RANK) if smp.rank() == 0 else smp.barrier()
    return type(told.value).__name__, str(told.value)


def test_a_wait_that_nobody_answers_ends_and_says_where_both_are(ranks):
    (kind, late), (other, gone) = ranks(_out_of_step, 2)
    assert kind == "DeadlineError"
    assert "rank 0 waited 1 s in smp.recv_from for rank 1, which waits in smp.barrier" in late
    assert "SMP_TIMEOUT_SECONDS" in late
    assert other == "RankLeftError"
    assert gone.startswith("rank 0 ended its script while rank 1 waits in smp.barrier; call it on every rank")


def _ends(call, folder):
    """The ranks but the first end their script, or fail, while the first one makes ``call``; gives what it raises."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import SMPRuntimeError
    from smp_runtime.job import session

    smp.init({"ddp": True})
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(x):
        model.backward(model(x).sum())

    train(torch.ones(2, 2))
    optimizer.step()
    sys.modules["__main__"].kept = model if call == "step" else None  # as a script does
    if smp.rank() != 0:
        session.current_session().has_failed = call == "failure"
        return None
    calls = {
        "save": lambda: smp.save_checkpoint(folder, "one"),
        "resume": lambda: smp.resume_from_checkpoint(folder),
        "gather": lambda: smp.allgather(1, smp.WORLD),
        "step": lambda: train(torch.ones(2, 2)),
    }
    with pytest.raises(SMPRuntimeError) as told:
        calls.get(call, smp.barrier)()
    return str(told.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("save", "rank 1 ended its script while rank 0 waits in smp.save_checkpoint"),
        pytest.param(
            "resume", "rank 1 ended its script while rank 0 waits in smp.resume_from_checkpoint", marks=pytest.mark.full
        ),
        pytest.param("gather", "rank 1 ended its script while rank 0 waits in smp.allgather", marks=pytest.mark.full),
        ("step", "rank 1 ended its script while rank 0 waits in the step _ends.<locals>.train"),
        ("failure", "rank 1 failed while rank 0 is in smp.barrier; the error of rank 1 is the cause"),
    ],
)
def test_who_waits_for_a_rank_that_has_left_is_told_at_once(ranks, tmp_path, call, words):
    told, _ = ranks(_ends, 2, call, str(tmp_path), init=False, timeout=30)
    assert words in told


def test_a_wait_is_named_by_the_call_of_the_script():
    """From the script to the wait: the constructor of a class of ours, and a function below it."""
    from smp_runtime.comm.waiting import script_s_call

    code = """
def below():
    return script_s_call()

class DistributedModel:
    def __init__(self):
        self.said = below()

    def state_dict(self):
        return below()
"""
    ours = {"__name__": "smp_runtime.model", "script_s_call": script_s_call}
    exec(code, ours)
    model = ours["DistributedModel"]()
    assert [model.said, model.state_dict(), ours["below"]()] == [
        "DistributedModel",
        "DistributedModel.state_dict",
        "below",
    ]


def test_a_job_that_is_joined_again_knows_nothing_of_the_one_that_was_left(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        smp.shutdown()
        smp.init()
        if smp.rank() == 1:
            time.sleep(0.8)  # longer than it takes to ask for the other, and to believe that it has left
        return smp.allgather(smp.rank(), smp.WORLD)

    assert ranks(run, 2) == [[0, 1], [0, 1]]


def test_ranks_that_were_configured_differently(ranks):
    def run():
        import os

        from smp_runtime.errors import ConfigError
        from smp_runtime.job import session

        with pytest.raises(ConfigError, match="rank 1 was configured with"):
            session.init({"microbatches": 1 + int(os.environ["RANK"])})

    ranks(run, 2, init=False)


def test_simulated_hosts_count_as_hosts(ranks):
    def run():
        import os

        import smdistributed.modelparallel.torch as smp

        os.environ["SMP_HOST"] = f"algo-{int(os.environ['RANK']) // 2 + 1}"
        smp.init()
        assert smp.get_world_process_group().size() == 4
        return smp.local_rank(), smp.local_size()

    assert ranks(run, 4, init=False) == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_the_jobs_configuration_wins_over_the_scripts(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        smp.init({"microbatches": 4, "ddp": True, "partitions": 1})
        return (
            smp.state.cfg.microbatches,
            smp.state.cfg.ddp,
            smp.state.cfg.partitions,
            smp.is_initialized(),
            smp.dp_size(),
        )

    env = {"SM_HP_MP_PARAMETERS": '{"microbatches": 2, "pipeline_parallel_degree": 1}'}
    assert ranks(run, 2, init=False, env=env) == [(2, True, 1, True, 2)] * 2


def test_strategies_that_are_not_there_are_named(solo):
    from smp_runtime.errors import ConfigError

    with pytest.raises(ConfigError, match="sharded_data_parallel_degree is 2"):
        solo({"sharded_data_parallel_degree": 2, "ddp": True})


def test_a_script_out_of_step_gets_no_message_of_the_runtime(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp
        from smp_runtime.errors import DeadlineError

        control = smp.init().control
        for call in (lambda: smp.allgather("user", smp.WORLD), smp.barrier):
            with pytest.raises(DeadlineError):
                call() if smp.rank() == 0 else control.allgather("runtime", [0, 1])

    ranks(run, 2, env={"SMP_TIMEOUT_SECONDS": "1"})
