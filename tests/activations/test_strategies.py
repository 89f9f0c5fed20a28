"""How children are put together to regions."""

from __future__ import annotations

import pytest

from smp_runtime.activations.strategies import Strategy, grouped
from smp_runtime.errors import SMPUserError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("each", [(0, "a"), (0, "b"), (0, "c"), (1, "d"), (1, "e"), (None, "f"), (None, "g"), (0, "h")]),
        ("contiguous", [(0, "abc"), (1, "de"), (None, "f"), (None, "g"), (0, "h")]),
        ("group_2", [(0, "ab"), (0, "c"), (1, "de"), (None, "f"), (None, "g"), (0, "h")]),
        ("group_9", [(0, "abc"), (1, "de"), (None, "f"), (None, "g"), (0, "h")]),
    ],
)
def test_groups_end_where_the_stage_changes(name, expected):
    groups = grouped("abcdefgh", [0, 0, 0, 1, 1, None, None, 0], Strategy.parse(name))
    assert [(stage, "".join(members)) for stage, members in groups] == expected


@pytest.mark.parametrize("name", ["all", "group_", "group_x", "", None, 4])
def test_an_unknown_strategy(name):
    with pytest.raises(SMPUserError, match="none of the checkpointing strategies: use 'each'"):
        Strategy.parse(name)


@pytest.mark.parametrize("name", ["group_0", "group_-2"])
def test_a_group_without_members(name):
    with pytest.raises(SMPUserError, match="at least one child; use 'group_1'"):
        Strategy.parse(name)
