"""User content that is plain data is saved without a look at each element; other content than a random state is refused."""

from __future__ import annotations

import io
from collections import OrderedDict

import pytest
import torch

from smp_runtime.checkpoint.files.atomic_file import _is_plain, user_content_bytes
from smp_runtime.checkpoint.live_state import check_random_state
from smp_runtime.errors import CheckpointError

CYCLE: list = [1]
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("content", "is_plain"),
    [
        ({"step": 3, "losses": [0.5, 1e9], "names": ("a", None, True), 5: {"deep": [[[-7]]]}}, True),
        ([*range(1000)], True),
        ([1 << 1999], True),
        ({"big": 1 << 3000}, False),
        ({"t": torch.ones(2)}, False),
        ([{1, 2}], False),
        (OrderedDict(a=1), False),
        ({(1, object): 2}, False),
    ],
)
def test_plain_content_is_read_back(content, is_plain):
    assert _is_plain(content) == is_plain
    if is_plain:
        assert torch.load(io.BytesIO(user_content_bytes(content)), weights_only=True) == content


def test_content_that_holds_itself_has_an_end():
    assert _is_plain(CYCLE)


@pytest.mark.parametrize("content", [5, torch.zeros(3), [], {"cpu": 5}, {"cuda": torch.zeros(1, dtype=torch.uint8)}])
def test_what_is_no_random_state_is_refused_as_damage(content):
    with pytest.raises(CheckpointError, match=type(content).__name__):
        check_random_state(content)


def test_random_states_are_taken():
    check_random_state(None)
    check_random_state({"cpu": torch.get_rng_state()})
