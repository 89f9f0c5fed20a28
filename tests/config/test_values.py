"""Counts as variables have them."""

from __future__ import annotations

import pytest

from smp_config.formats.values import parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("1000", 1000),
        ("0000000000123", 123),
        ("00000012345", None),
        ("1001", None),
        ("9" * 5000, None),
        ("0", None),
        ("", None),
        ("-1", None),
        ("1.0", None),
        ("²", None),
        ("١", None),
        (" 1", None),
    ],
)
def test_counts(text, count):
    assert parse_count(text, 1000) == count
