"""What is wrong with an order or a record, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.ranks.schedules import chain, gpipe, one_f_one_b

from smp_config.schedules import SCHEDULES
from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.pipeline.schedule.actions import Action, ScheduleError, Segment, TaskKind
from smp_runtime.pipeline.schedule.planner import plan
from smp_runtime.pipeline.schedule.policies import POLICIES, policy_named
from smp_runtime.pipeline.schedule.simulation import simulate

INTERLEAVED, SIMPLE = POLICIES["interleaved"], POLICIES["simple"]
F, S = TaskKind.FORWARD, TaskKind.STEP


def standard():
    return chain(4, 8, 0.020, 0.040, step_seconds=0.0001, step_rank=0)


def small():
    return chain(2, 2, 1.0, 2.0), {rank: list(order) for rank, order in one_f_one_b(2, 2).items()}


def test_a_deadlock_names_its_circle():
    segments, orders = small()
    orders[0] = [orders[0][2], *orders[0][:2], orders[0][3]]
    with pytest.raises(ScheduleError, match="deadlocks") as caught:
        simulate(orders, segments, active=2)
    assert isinstance(caught.value, SMPRuntimeError)
    text = str(caught.value)
    assert "B0/0 (rank 0) needs what comes from B0/1 (rank 1)" in text
    assert "F0/0 (rank 0) comes in its rank's order after B0/0 (rank 0)" in text


def test_too_many_forwards_for_the_active_microbatches_deadlock():
    with pytest.raises(
        ScheduleError, match="may only begin when one of 2 active microbatches is finished, which lacks"
    ):
        simulate(gpipe(2, 3), chain(2, 3, 1.0, 2.0), active=2)


def test_parts_in_the_wrong_order_deadlock():
    segments = standard()
    orders = {r: list(order) for r, order in plan(segments, policy=INTERLEAVED, active=6).orders.items()}
    first, second = orders[0].index(Action(S, 0)), orders[0].index(Action(S, 0, (), 1))
    orders[0][first], orders[0][second] = orders[0][second], orders[0][first]
    with pytest.raises(ScheduleError, match=r"S0\.1 \(rank 0\) needs what comes from S0 \(rank 0\)"):
        simulate(orders, segments, active=6)


def test_every_action_stands_once_and_at_home():
    segments, orders = small()
    with pytest.raises(ScheduleError, match="B1/1 was recorded on rank 1, but its order lacks it"):
        simulate({**orders, 1: orders[1][:-1]}, segments, active=2)
    with pytest.raises(ScheduleError, match="F0/0 stands twice in the order of rank 0"):
        simulate({**orders, 0: [*orders[0], orders[0][0]]}, segments, active=2)
    with pytest.raises(ScheduleError, match="F0/0 is in the order of rank 1, but was recorded on rank 0"):
        simulate({0: orders[0][1:], 1: [orders[0][0], *orders[1]]}, segments, active=2)
    with pytest.raises(ScheduleError, match="F7 is in the order of rank 0, but was not recorded"):
        simulate({**orders, 0: [*orders[0], Action(F, 7)]}, segments, active=2)


def test_a_record_that_contradicts_itself():
    segments, _ = small()
    missing = [s for s in segments if s.action != Action(F, 1, (0,))]
    with pytest.raises(ScheduleError, match=r"F1/1 on rank 1 needs \('value', 1, 0\), which no recorded segment gives"):
        plan(missing, policy=INTERLEAVED, active=2)
    with pytest.raises(ScheduleError, match="was recorded twice"):
        plan([*segments, segments[0]], policy=INTERLEAVED, active=2)
    twice = [*segments, replace(segments[0], action=Action(F, 9))]
    with pytest.raises(ScheduleError, match=r"\('value', 0, 0\) was recorded twice: given by F0/0 and by F9"):
        plan(twice, policy=INTERLEAVED, active=2)
    with pytest.raises(ScheduleError, match=r"a duration of -1\.0 s"):
        plan([replace(segments[0], seconds=-1.0)], policy=INTERLEAVED, active=2)
    circle = [
        Segment(Action(F, 0, (0,)), 0, 1.0, F, (("b",),), ((("a",), 1.0),)),
        Segment(Action(F, 0, (1,)), 1, 1.0, F, (("a",),), ((("b",), 1.0),)),
    ]
    with pytest.raises(ScheduleError, match=r"F0/0 \(rank 0\) needs what comes from F0/1 \(rank 1\); F0/1 .* F0/0"):
        plan(circle, policy=INTERLEAVED, active=2)


def test_settings_that_cannot_be():
    with pytest.raises(SMPUserError, match=", ".join(map(repr, SCHEDULES))):
        policy_named("zigzag")
    with pytest.raises(SMPUserError, match="active_microbatches is 0"):
        plan(standard(), policy=SIMPLE, active=0)
    assert plan([], policy=SIMPLE, active=1).orders == {}
