"""Bytes of attention over ranks that share sequences out: those that travel, and those of buffers.

b samples, s tokens, h heads and k key heads of width d, c ranks. With a ring, or with all keys gathered, the rank that needs most
receives 2·(c − 1)/c·b·s·k·d elements in forward. Backward fetches them again and returns as many gradients. n neighbors that
exchange heads send (2h + 2k)·(n − 1)/(n·c)·b·s·d in each pass, and are one member of a ring of c/n.

PyTorch's ``context_parallel`` gathers keys and values of all ranks at once, in forward and again in backward. Their gradients go
around all c ranks in fp32, once per block of keys and once more to their owner. Source: ``_templated_ring_attention`` and its
backward in ``torch.distributed.tensor.experimental``, with their default, an all-gather.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters
    from smp_estimator.planning.model_shape import ModelShape

#: Of the keys of all ranks, zig-zag halves of causal sequences send so many on average.
_CAUSAL_PART = 0.75

#: Buffers of gradients have this size whatever the type of the activations.
_SUM_BYTES = 4


@dataclass(frozen=True)
class ContextShare:
    """How the ranks of a context group compute attention.

    Attributes:
        degree: ranks.
        method: ``"ring"``, ``"all_gather"`` or ``"all_to_all"``.
        neighbors: that exchange heads; 1 for the other methods.
        heads, key_heads: of a tensor parallel rank.
        width: of a head.
        is_pytorch: it is PyTorch's ``context_parallel``.
    """

    degree: int
    method: str
    neighbors: int
    heads: float
    key_heads: float
    width: float
    is_pytorch: bool = False

    @classmethod
    def of(cls, parameters: ModelParallelParameters, shape: ModelShape) -> ContextShare | None:
        """Return the share of a job; None without context parallelism.

        ``auto`` takes the method that sends the fewest bytes for a causal model.
        """
        degree, tensor = parameters.context_parallel_degree, parameters.tensor_parallel_degree
        if degree == 1:
            return None
        heads, key_heads = shape.heads / tensor, shape.key_heads / tensor
        width = shape.head_width
        common = math.gcd(shape.heads, shape.key_heads) // tensor
        neighbors = max(n for n in range(1, degree + 1) if degree % n == 0 and (common % n == 0 or n == 1))
        by_heads = cls(degree, "all_to_all", neighbors, heads, key_heads, width)
        as_ring = cls(degree, "ring", 1, heads, key_heads, width)
        wanted = parameters.context_parallel
        if wanted == "all_gather":
            return cls(degree, wanted, 1, heads, key_heads, width)
        if neighbors == 1 or wanted == "ring":
            return as_ring
        sends_less = by_heads._elements_sent(_CAUSAL_PART) < as_ring._elements_sent(_CAUSAL_PART)
        return by_heads if wanted == "all_to_all" or sends_less else as_ring

    @classmethod
    def of_pytorch(cls, parameters: ModelParallelParameters, shape: ModelShape) -> ContextShare | None:
        """Return the share of a job that uses PyTorch's ``context_parallel`` on keys that are repeated for each head."""
        degree = parameters.context_parallel_degree
        if degree == 1:
            return None
        heads = shape.heads / parameters.tensor_parallel_degree
        return cls(degree, "all_gather", 1, heads, heads, shape.head_width, is_pytorch=True)

    @property
    def _key_width(self) -> float:
        """Return the elements of a token's keys and values."""
        return 2 * self.key_heads * self.width

    def forward_elements(self, tokens: int) -> float:
        """Return the elements that a rank receives in a layer's forward pass.

        Args:
            tokens: of the whole sequences of all samples.
        """
        return tokens * (self._by_heads + self._around(1.0))

    def backward_elements(self, tokens: int) -> float:
        """Return the elements that a rank receives in a layer's backward pass."""
        if self.is_pytorch:
            # Gradients of 4 bytes count as two elements of half precision.
            return tokens * (self._around(1.0) + 2 * self._key_width)
        return tokens * (self._by_heads + 2 * self._around(1.0))

    def merged_bytes(self, tokens: int, *, compiled: bool) -> tuple[float, float]:
        """Return the bytes that a rank moves to merge the results of blocks in a layer: in forward, and in backward.

        Only PyTorch's way is known. Forward merges a block's results into fp32 sums, backward adds its three gradients to fp32
        sums. Compiled, each sum is one kernel. Uncompiled, each operation reads and writes for itself, and packing counts too.
        These bytes were counted in PyTorch 2.13 with eight ranks.

        Args:
            tokens: that the rank holds.
        """
        if not self.is_pytorch:
            return 0.0, 0.0
        forward, backward = (10, 30) if compiled else (43, 70)
        elements = tokens * (self.degree - 1) * self.heads * self.width
        return forward * elements, backward * elements

    @property
    def _by_heads(self) -> float:
        """Return the elements for each token that neighbors exchange in a pass: queries, results, keys and values."""
        share = (self.neighbors - 1) / (self.neighbors * self.degree)
        return share * (2 * self.heads * self.width + self._key_width)

    def _around(self, part: float) -> float:
        """Return the elements of keys and values for each token that go around the ring."""
        members = self.degree // self.neighbors
        return part * self._key_width / self.neighbors * (members - 1) / members

    def _elements_sent(self, part: float) -> float:
        return 2 * self._by_heads + 3 * self._around(part)

    def buffer_bytes(self, tokens: int, element_bytes: int) -> int:
        """Return the bytes of buffers in a layer's backward pass, when attention has most of them.

        Gradients of queries, keys and values are summed in fp32. Blocks of keys and values are packed to be sent, and received: in
        a ring the one that is used and the next one, in an all-gather all others. Their gradients are summed, packed and sent back.
        Neighbors that exchange heads pack and receive queries, keys, values and results.

        Args:
            tokens: that the rank holds.
        """
        if self.is_pytorch:
            return round(tokens * self.heads * self.width * self._bytes_of_pytorch(element_bytes))
        sums = _SUM_BYTES * (self.heads * self.width + self._key_width)
        members = self.degree // self.neighbors
        blocks = min(2, members - 1) if self.method != "all_gather" else members - 1
        block = self._key_width
        of_blocks = block * (2 * blocks * element_bytes)
        if members > 1:
            returned = 1 if self.method != "all_gather" else members - 1
            of_blocks += block * (_SUM_BYTES + 3 * returned * element_bytes)
        packed = 0.0
        if self.neighbors > 1:
            packed = 2 * element_bytes * (2 * self.heads * self.width + self._key_width)
        return round(tokens * (sums + of_blocks + packed))

    def _bytes_of_pytorch(self, element_bytes: int) -> int:
        """Return the bytes of PyTorch's buffers in backward, for each token and element of its queries.

        Keys and values of all ranks, and those that were packed for them. Sums of three gradients in fp32, the packed ones that
        are sent, and those that are received. The gradients of a block, and the kernel's own sum for queries.
        """
        gathered = 2 * element_bytes * (self.degree + 1)
        return gathered + 3 * _SUM_BYTES + 2 * 2 * _SUM_BYTES + 3 * element_bytes + _SUM_BYTES
