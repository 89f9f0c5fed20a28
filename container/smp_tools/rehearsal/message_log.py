"""Messages of ranks that were rehearsed earlier, to replay for ranks that are rehearsed later.

The last rank of each stage is rehearsed after the first ranks have finished. It receives the messages that they recorded.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: ``said-0.pickle`` in the request's folder; only these processes write to that folder.
_PREFIX, _SUFFIX = "said-", ".pickle"

#: Sender, call, channel, and receivers: one rank, or all of a group.
_Key = tuple[int, str, int, tuple[int, ...]]


class MessageLog:
    """Messages of ranks, in the order in which they were sent.

    Args:
        speakers: ranks that were rehearsed before; their messages are in ``folder``.
    """

    def __init__(self, speakers: Iterable[int] = (), folder: str = "") -> None:
        self.speakers = frozenset(speakers)
        self._sayings: dict[_Key, deque[bytes]] = defaultdict(deque)
        for rank in self.speakers:
            path = Path(folder, f"{_PREFIX}{rank}{_SUFFIX}")
            # Written by a process of this rehearsal into the folder that was made for it.
            self._sayings.update(pickle.loads(path.read_bytes()) if path.exists() else {})

    def note(self, rank: int, call: str, channel: int, to: Sequence[int], payload: Any) -> None:
        """Record a rank's message, unless it cannot be pickled."""
        try:
            saying = pickle.dumps(payload)
        except Exception:  # whatever an object of the script raises
            return
        self._sayings[rank, call, channel, tuple(to)].append(saying)

    def next(self, rank: int, call: str, channel: int, to: Sequence[int]) -> tuple[bool, Any]:
        """Return whether there is another message from a rank there, and the message."""
        waiting = self._sayings.get((rank, call, channel, tuple(to)))
        return (True, pickle.loads(waiting.popleft())) if waiting else (False, None)

    def leave(self, rank: int, folder: str) -> None:
        """Write a rank's messages to a file."""
        Path(folder, f"{_PREFIX}{rank}{_SUFFIX}").write_bytes(pickle.dumps(dict(self._sayings)))
