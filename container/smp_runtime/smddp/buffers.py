"""Memory of a fixed size, allocated once, that all-gathers take pieces of and give back."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from smp_runtime.errors import SMPOperationError

#: Pieces begin at multiples of this many bytes, so that every type can be seen in them.
_ALIGNMENT = 64


@dataclass
class BufferPiece:
    """A piece that was taken.

    Attributes:
        bytes: the memory, ``[size]`` of uint8.
    """

    bytes: torch.Tensor
    start: int
    stop: int
    is_back: bool = False


class RingBuffer:
    """A buffer that gives out pieces in turn; their memory is free again in the order in which they were taken.

    Args:
        size: bytes of the whole.
        device: where they are; memory is allocated at the first use.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._device = device
        self._memory: torch.Tensor | None = None
        self._taken: deque[BufferPiece] = deque()
        # The training's thread takes pieces, and the thread of the all-gathers returns them.
        self._lock = threading.Lock()
        self._broken: BaseException | None = None

    def has_room(self, size: int) -> bool:
        """Return whether ``size`` bytes in a row are free; also True after a failure, since they will never be."""
        with self._lock:
            return self._broken is not None or self._place(size) is not None

    def take(self, size: int) -> BufferPiece:
        """Return a piece of ``size`` bytes, for which there is room.

        Raises:
            RuntimeError: an earlier all-gather failed, so that pieces are not given back any more.
        """
        with self._lock:
            if self._memory is None:
                self._memory = torch.empty(self.size, dtype=torch.uint8, device=self._device)
            self.check()
            start = self._place(size)
            if start is None or not 0 < size <= self.size:
                raise AssertionError(f"a piece of {size} bytes was asked of a buffer of {self.size}")
            stop = min(start + -(-size // _ALIGNMENT) * _ALIGNMENT, self.size)
            piece = BufferPiece(self._memory[start : start + size], start, stop)
            self._taken.append(piece)
            return piece

    @property
    def in_use(self) -> bool:
        """Return whether a piece is taken."""
        return bool(self._taken)

    def give_back(self, piece: BufferPiece) -> None:
        """Free a piece, once all older ones are back too."""
        # In the order of taking: the free bytes are those between the newest piece and the oldest.
        with self._lock:
            piece.is_back = True
            while self._taken and self._taken[0].is_back:
                self._taken.popleft()

    def check(self) -> None:
        """Check that nothing has failed.

        Raises:
            RuntimeError: something has.
        """
        if self._broken is not None:
            raise SMPOperationError(f"an earlier all-gather of this group failed: {self._broken}", code="SMP316")

    def fail(self, error: BaseException) -> None:
        """Record that pieces will not come back; a later request for one raises an error."""
        with self._lock:
            self._broken = self._broken or error

    def _place(self, size: int) -> int | None:
        """Return the start of ``size`` free bytes; None if there are none."""
        if not self._taken:
            return 0
        oldest, newest = self._taken[0], self._taken[-1]
        has_wrapped = newest.start < oldest.start
        # The free bytes lie behind the newest, up to the end of the ring or to the oldest.
        end = oldest.start if has_wrapped else self.size
        if newest.stop + size <= end:
            return newest.stop
        if not has_wrapped and size <= oldest.start:
            return 0
        return None
