"""Counts as variables have them, and numbers as JSON has them."""

from __future__ import annotations

import json
import math

import pytest

from smp_config.formats.strict_json import parse, replace_non_finite
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


def test_numbers_that_json_lacks_are_texts():
    given = {"rows": [1.5, (math.nan, [-math.inf])], "text": "nan", "none": None, "count": 3, "is": True}
    written = json.dumps(replace_non_finite(given), allow_nan=False)
    assert parse(written) == {"rows": [1.5, ["nan", ["-inf"]]], "text": "nan", "none": None, "count": 3, "is": True}
