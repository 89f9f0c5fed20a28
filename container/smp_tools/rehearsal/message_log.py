"""What ranks that were rehearsed first have said, for those that are rehearsed after them.

The last rank of each stage is rehearsed when the first ones are through. What it would hear of them is what they have said.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: ``said-0.pickle`` in the request's folder, which nobody but these processes writes to.
_PREFIX, _SUFFIX = "said-", ".pickle"

#: Who has said it, in which call, over which channel, and to whom: a rank, or all of a group.
_Key = tuple[int, str, int, tuple[int, ...]]


class MessageLog:
    """Sayings of ranks, in the order in which they were said.

    Args:
        speakers: ranks that were rehearsed before, whose sayings are in ``folder``.
    """

    def __init__(self, speakers: Iterable[int] = (), folder: str = "") -> None:
        self.speakers = frozenset(speakers)
        self._sayings: dict[_Key, deque[bytes]] = defaultdict(deque)
        for rank in self.speakers:
            path = Path(folder, f"{_PREFIX}{rank}{_SUFFIX}")
            # Written by a process of this rehearsal into the folder that was made for it.
            self._sayings.update(pickle.loads(path.read_bytes()) if path.exists() else {})

    def note(self, rank: int, call: str, channel: int, to: Sequence[int], payload: Any) -> None:
        """A rank says something; what cannot travel is not noted."""
        try:
            saying = pickle.dumps(payload)
        except Exception:  # whatever an object of the script raises
            return
        self._sayings[rank, call, channel, tuple(to)].append(saying)

    def next(self, rank: int, call: str, channel: int, to: Sequence[int]) -> tuple[bool, Any]:
        """Whether a rank has said something more there, and what."""
        waiting = self._sayings.get((rank, call, channel, tuple(to)))
        return (True, pickle.loads(waiting.popleft())) if waiting else (False, None)

    def leave(self, rank: int, folder: str) -> None:
        """Write down what a rank has said."""
        Path(folder, f"{_PREFIX}{rank}{_SUFFIX}").write_bytes(pickle.dumps(dict(self._sayings)))
