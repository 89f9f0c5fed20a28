"""After which step the ranks stop: the same one on all, whoever was asked and however far apart they are."""

from __future__ import annotations

import os
import signal

import pytest

from smp_runtime.preemption.stop_agreement import StopAgreement


def _walked(seed, asked, most=400):
    """Several agreements: every rank walks at a pace of its own, and some are asked at moments of their own."""
    import random
    import time

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.preemption.stop_agreement import StopAgreement

    session, found = smp.state, []
    pace = random.Random(f"{seed} {smp.rank()}")
    for _ in range(6):
        agreement = StopAgreement(session.ranks.control)
        mine = pace.randrange(1, 40) if smp.rank() in asked else 0
        for step in range(1, most):
            if step == mine:
                agreement.request("SIGTERM")
            time.sleep(pace.uniform(0.0, 0.02))
            reason = agreement.finished_step()
            if reason:
                found.append((step, mine, reason))
                break
        smp.barrier()  # as those that save do
        agreement.close()
    return found


@pytest.mark.parametrize("asked", [(0,), (2,), (0, 1, 2)])
def test_ranks_far_apart_stop_after_the_same_step(ranks, asked):
    by_rank = ranks(_walked, 3, 1, asked)
    assert [len(found) for found in by_rank] == [6, 6, 6]
    for found in zip(*by_rank, strict=True):
        assert len({step for step, _, _ in found}) == 1, found
        assert {reason for *_, reason in found} == {"SIGTERM"}
        # Not before who was asked first, and soon after.
        assert found[0][0] >= min(mine for _, mine, _ in found if mine)


def test_nobody_stops_when_a_rank_has_left(ranks):
    def run():
        import time

        import smdistributed.modelparallel.torch as smp
        from smp_runtime.preemption.stop_agreement import StopAgreement

        agreement = StopAgreement(smp.state.ranks.control)
        for _ in range(3):
            assert agreement.finished_step() is None
        if smp.rank() == 1:
            agreement.close()
        smp.barrier()
        if smp.rank() == 0:
            agreement.request("SIGTERM")
            time.sleep(0.5)
        reasons = [agreement.finished_step() for _ in range(3)] if smp.rank() == 0 else []
        agreement.close()
        return reasons

    assert ranks(run, 2) == [[None] * 3, []]


def test_a_stranger_in_the_store_stops_nobody(ranks):
    def run():
        import time

        import smdistributed.modelparallel.torch as smp
        from smp_runtime.preemption.stop_agreement import StopAgreement

        agreement = StopAgreement(smp.state.ranks.control)
        board = agreement._board
        if smp.rank() == 0:
            board._store.set(f"{board._title}/asked", b'["SIGTERM"]')
            board._store.set(f"{board._title}/last", b'[2, "SIGTERM"]')
        smp.barrier()
        until = time.monotonic() + 30
        while agreement._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.01)
        smp.barrier()
        found = [agreement.finished_step() for _ in range(3)]
        told = board.read("last")  # for those that have heard nothing of it
        agreement.close()
        return found, told

    assert ranks(run, 2) == [([None] * 3, [-1, ""])] * 2


def test_without_a_second_connection_every_step_asks(ranks, monkeypatch):
    def run():
        import smdistributed.modelparallel.torch as smp
        from smp_runtime.preemption import stop_agreement

        former = stop_agreement.second_connection
        stop_agreement.second_connection = lambda *_: None
        try:
            agreement = stop_agreement.StopAgreement(smp.state.ranks.control)
        finally:
            stop_agreement.second_connection = former
        found = []
        for step in range(3):
            if step == smp.rank() == 1:
                agreement.request("SIGTERM")
            found.append(agreement.finished_step())
        agreement.close()
        return found

    assert ranks(run, 2) == [[None, "SIGTERM", "SIGTERM"]] * 2


def test_one_process_listens_and_its_children_do_not(solo):
    agreement = StopAgreement(solo({}).ranks.control)
    before = signal.getsignal(signal.SIGTERM)
    assert agreement.listen()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert agreement.finished_step() is None
    agreement.close()
    assert signal.getsignal(signal.SIGTERM) is before

    agreement = StopAgreement(solo({}).ranks.control)
    assert agreement.listen()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert agreement.finished_step() == "SIGTERM"
        agreement.close()
        # What has begun is not ended by a second request.
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_of_the_script_stays(solo):
    agreement = StopAgreement(solo({}).ranks.control)
    heard = []

    def own(*_):
        heard.append(True)

    former = signal.signal(signal.SIGTERM, own)
    try:
        assert not agreement.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard
        assert agreement.finished_step() is None
        agreement.close()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, former)
