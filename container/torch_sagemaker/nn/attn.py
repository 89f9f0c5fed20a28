"""Attention from queries, keys and values."""

from smp_version2.attention.flash import FlashGroupedQueryAttention, FlashSelfAttention

__all__ = ["FlashGroupedQueryAttention", "FlashSelfAttention"]
