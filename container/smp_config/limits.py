"""Limits of a job: seconds of a wait, ranks, collectives in flight, and the sizes of buckets; some are set by variables."""

from __future__ import annotations

from collections.abc import Mapping

from smp_config.errors import ConfigError, show_value
from smp_config.formats.values import parse_number

#: Seconds that a rank waits for another.
TIMEOUT_VARIABLE = "SMP_TIMEOUT_SECONDS"
DEFAULT_TIMEOUT_SECONDS = 1800.0
#: The longest wait, about 30 years; clocks and connections do not accept much longer ones.
MOST_SECONDS = 1e9

#: Most ranks of a job. No cluster has more, and computations for each rank would take minutes with more.
MOST_RANKS = 2**17
#: Most ranks of a job that runs as processes of one machine.
MOST_LOCAL_RANKS = 2**12

#: Steps or comparisons between two looks of a tool.
MOST_EVERY = 1_000_000

#: Default of ``bucket_cap_mb``, in bytes.
BUCKET_CAP_BYTES = 25 * 2**20
#: Below this latency outweighs what an earlier start wins.
_SMALLEST_BUCKET = 2**20
#: Bytes of whole matrices that a rank puts together at a time for Muon, if the largest one is not larger.
MATRIX_ROUND_BYTES = 2**24

#: Seconds without progress after which a job hangs; 0 for no watch.
HANG_VARIABLE = "SMP_HANG_SECONDS"

#: The same if it is not set; more in jobs with long steps.
LEAST_HANG_SECONDS = 60.0

#: Collectives of tensor parallelism that may be queued on a GPU.
THROTTLE_VARIABLE = "SMP_NCCL_THROTTLE_LIMIT"
DEFAULT_THROTTLE = 8


#: How partial checkpoints of sharded data parallelism are written: as ranks hold parameters, or for tools that read flat groups.
LAYOUT_VARIABLE = "SMP_CHECKPOINT_LAYOUT"
FLAT_GROUPS = "flat_groups"


def wants_flat_groups(environ: Mapping[str, str]) -> bool:
    """Return whether checkpoints have the layout of other tools; raise ConfigError for a layout that does not exist."""
    text = environ.get(LAYOUT_VARIABLE, "")
    if text not in ("", "held", FLAT_GROUPS):
        raise ConfigError(
            f"{LAYOUT_VARIABLE} is {show_value(text)}; it is the layout of partial checkpoints under sharded data parallelism: set "
            f"held, the default, or {FLAT_GROUPS} for tools that read such groups",
            code="SMP106",
        )
    return text == FLAT_GROUPS


def timeout_seconds(environ: Mapping[str, str]) -> float:
    """Return the deadline of every wait, in seconds; raise ConfigError unless it is a number above 0."""
    text = environ.get(TIMEOUT_VARIABLE, "")
    value = parse_number(text) if text else DEFAULT_TIMEOUT_SECONDS
    if value is None or not 0 < value <= MOST_SECONDS:
        raise ConfigError(
            f"{TIMEOUT_VARIABLE} is {show_value(text)}; it counts the seconds that a rank waits for another: set a number "
            "above 0, and "
            f"of at most {MOST_SECONDS:,.0f}",
            code="SMP106",
        )
    return value


def hang_seconds(environ: Mapping[str, str]) -> float | None:
    """Return the user's hang timeout in seconds: 0 for no watch, None if it is not set.

    Raises:
        ConfigError: If the value is not a finite number from 0.
    """
    text = environ.get(HANG_VARIABLE, "")
    if not text:
        return None
    value = parse_number(text)
    if value is None or value < 0:
        raise ConfigError(
            f"{HANG_VARIABLE} is {text!r}; it counts the seconds without progress after which a job hangs: set a number above 0, "
            "or 0 for no watch",
            code="SMP106",
        )
    return value


def throttle_limit(environ: Mapping[str, str]) -> int:
    """Return the limit of collectives in flight, -1 for no limit; raise ConfigError for other values below 1."""
    text = environ.get(THROTTLE_VARIABLE, "")
    try:
        limit = int(text) if text else DEFAULT_THROTTLE
    except ValueError:
        limit = 0
    if limit != -1 and not 1 <= limit < 2**31:
        raise ConfigError(
            f"{THROTTLE_VARIABLE} is {show_value(text)}; it counts collectives that may be in flight at once: set a number from 1, "
            "or -1 for no limit",
            code="SMP106",
        )
    return limit


def effective_bucket_bytes(total_bytes: int, cap_bytes: int = BUCKET_CAP_BYTES) -> int:
    """Return the size at which gradient buckets are closed: ``cap_bytes``, or less for a small model.

    A small model's buckets hold an eighth of it. No computation overlaps with the last bucket of a step,
    so it should be a small part of the whole.
    """
    return min(cap_bytes, max(_SMALLEST_BUCKET, total_bytes // 8))
