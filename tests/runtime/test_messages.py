"""Object messages over the store; the same over MPI is in tests/jobs."""

from __future__ import annotations

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


def test_a_wait_that_nobody_answers_has_a_deadline(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp
        from smp_runtime.errors import DeadlineError

        if smp.rank() == 0:
            with pytest.raises(DeadlineError, match="SMP_TIMEOUT_SECONDS"):
                smp.recv_from(1, smp.RankType.WORLD_RANK)

    ranks(run, 2, env={"SMP_TIMEOUT_SECONDS": "1"})


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
