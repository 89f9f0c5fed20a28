"""The order in which units are needed, recorded in one window and followed in the next."""

from __future__ import annotations

from collections.abc import Iterator

#: How many expected needs may be skipped before the order counts as another one.
_SKIPS = 8


class NeedOrder:
    """What was needed one after the other in the last window of a kind, and where the present one stands.

    A *window* is what repeats: a training step with all its microbatches, forward and backward, or an evaluation.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[int]] = {}
        self._kind: str | None = None
        self._recorded: list[int] = []
        self._position = 0
        self._follows = False

    @property
    def is_open(self) -> bool:
        """Whether a window is being recorded."""
        return self._kind is not None

    def begin(self, kind: str) -> None:
        """A window begins; one that was open is forgotten."""
        self._kind = kind
        self._recorded = []
        self._position = 0
        self._follows = kind in self._known

    def note(self, number: int) -> None:
        """A unit is needed."""
        if self._kind is None:
            return
        self._recorded.append(number)
        if not self._follows:
            return
        ahead = self._known[self._kind][self._position : self._position + _SKIPS]
        if number in ahead:
            self._position += ahead.index(number) + 1
        else:
            self._follows = False

    def end(self) -> None:
        """The window ends; its order is what the next one of its kind will follow."""
        if self._kind is not None and self._recorded:
            self._known[self._kind] = self._recorded
        self._kind = None
        self._follows = False

    def upcoming(self, count: int) -> Iterator[int]:
        """The next units that are expected, at most ``count`` different ones; nothing while the order is unknown."""
        if not self._follows or self._kind is None:
            return
        seen: set[int] = set()
        for number in self._known[self._kind][self._position :]:
            if number not in seen:
                if len(seen) == count:
                    return
                seen.add(number)
                yield number
