"""The size of gradient buckets, decided in one place for the runtime that fills them and the plan that counts them."""

from __future__ import annotations

#: Default of ``bucket_cap_mb``, in bytes.
BUCKET_CAP_BYTES = 25 * 2**20

#: Below this latency outweighs what an earlier start wins.
_SMALLEST = 2**20


def effective_bucket_bytes(total_bytes: int, cap_bytes: int = BUCKET_CAP_BYTES) -> int:
    """The size at which buckets are closed: at most ``cap_bytes``, an eighth of a small model.

    The last bucket of a step has nothing to hide behind, so it should be a small part of the whole.
    """
    return min(cap_bytes, max(_SMALLEST, total_bytes // 8))
