"""Types of numbers in settings, which accept numbers only: pydantic alone would take ``True`` and ``"8"`` silently."""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any

from pydantic import BeforeValidator

from smp_config.errors import show_value

#: The largest whole number of a setting: ranks count in 64 bits.
_LARGEST = 2**63 - 1


def _refuse_other_types(value: Any, wanted: str) -> None:
    # bool is a subclass of int, so it must be named.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be {wanted}, got {show_value(value)} ({type(value).__name__})")


def _whole_number(value: Any) -> Any:
    """Accept 8 and 5e8, refuse True, "8" and 0.5: pydantic alone would take some of them silently."""
    _refuse_other_types(value, "a whole number")
    if isinstance(value, float):
        is_whole = math.isfinite(value) and value == int(value)
        if not is_whole:
            raise ValueError(f"must be a whole number, got {value!r}")
    if abs(value) > _LARGEST:
        raise ValueError(f"must be a whole number of at most {_LARGEST}, got one of {_digits(value)} digits")
    return int(value)


def _number(value: Any) -> Any:
    _refuse_other_types(value, "a number")
    is_too_large = isinstance(value, int) and abs(value) > sys.float_info.max
    if is_too_large:
        raise ValueError(f"must be a number of at most {sys.float_info.max:g}, got one of {_digits(value)} digits")
    if not math.isfinite(value):
        raise ValueError(f"must be a number, got {value!r}")
    return float(value)


def _digits(value: float) -> int:
    """Return the approximate number of digits of an integer; Python writes out no more than 4,300."""
    # By the logarithm of 2 to base 10, 0.30103.
    return int(value).bit_length() * 30103 // 100000 + 1


Whole = Annotated[int, BeforeValidator(_whole_number)]
Real = Annotated[float, BeforeValidator(_number)]
