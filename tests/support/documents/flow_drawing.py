"""Boxes and arrows in SVG, for the pictures of the documents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from smp_estimator.figures.svg import picture, text

#: Units of a letter's width and a line's height, at the size of the boxes' text.
_LETTER, _LINE = 6.6, 16.0
_TOP, _ROW_GAP = 32.0, 22.0


@dataclass(frozen=True)
class Box:
    """A box of a grid; ``words`` are lines, divided by ``|``, and ``colour`` fills it thinly."""

    column: int
    row: float
    words: str
    colour: str = "#8c8c8c"

    @property
    def lines(self) -> list[str]:
        """What is written into it."""
        return self.words.split("|")


def path(*names: str) -> list[tuple[str, str, str]]:
    """Arrows from each box to the next, with no words beside them."""
    return [(one, other, "") for one, other in itertools.pairwise(names)]


@dataclass(frozen=True)
class Flow:
    """Boxes by name and arrows between them: from, to, and what stands beside the arrow."""

    title: str
    boxes: Mapping[str, Box]
    arrows: Sequence[tuple[str, str, str]]
    both_ways: bool = False
    _left: dict[int, float] = field(default_factory=dict)
    _wide: dict[int, float] = field(default_factory=dict)

    def svg(self) -> str:
        """The picture, whose texts take the colour of the page."""
        self._place()
        high = max(len(box.lines) for box in self.boxes.values()) * _LINE + 14
        frames = {name: self._frame(box, high) for name, box in self.boxes.items()}
        parts = [part for arrow in self.arrows for part in self._arrow(frames, *arrow)]
        parts += [part for name, box in self.boxes.items() for part in _drawn(box, frames[name])]
        width = max(x + wide for x, _, wide, _ in frames.values()) + 6
        height = max(y + tall for _, y, _, tall in frames.values()) + 8
        return picture(self.title, height, parts, max(width, 7 * len(self.title)))

    def _place(self) -> None:
        """Columns as wide as their longest line, with room between them for what stands beside the arrows."""
        at = 6.0
        for column in range(1 + max(box.column for box in self.boxes.values())):
            longest = max(len(line) for box in self.boxes.values() if box.column == column for line in box.lines)
            self._left[column], self._wide[column] = at, longest * _LETTER + 18
            beside = [
                len(words)
                for start, stop, words in self.arrows
                if min(self.boxes[start].column, self.boxes[stop].column) == column
                and self.boxes[start].column != self.boxes[stop].column
            ]
            at += self._wide[column] + max([46.0, *(letters * 5.8 + 30 for letters in beside)])

    def _frame(self, box: Box, high: float) -> tuple[float, float, float, float]:
        tall = len(box.lines) * _LINE + 14
        return (
            self._left[box.column],
            _TOP + box.row * (high + _ROW_GAP) + (high - tall) / 2,
            self._wide[box.column],
            tall,
        )

    def _arrow(self, frames: Mapping[str, tuple[float, ...]], start: str, stop: str, words: str) -> Iterator[str]:
        (ax, ay, aw, ah), (bx, by, bw, bh) = frames[start], frames[stop]
        back = (stop, start) in {(one, other) for one, other, _ in self.arrows}
        if self.boxes[start].column == self.boxes[stop].column:
            x, down = ax + min(aw, bw) / 2, by > ay
            y, end = (ay + ah, by) if down else (ay, by + bh)
            yield from self._line([(x, y), (x, end)])
            yield text(x + 7, (y + end) / 2 + 4, words, size=11)
            return
        forward = bx > ax
        shift = (-8 if forward else 8) if back else 0
        x, end = (ax + aw, bx) if forward else (ax, bx + bw)
        y, to = ay + ah / 2 + shift, by + bh / 2 + shift
        # Below, words stand over the arrow's end; above, over its beginning, so that those of two arrows to one box do not meet.
        middle = (x + end) / 2 if not words else x + 14 if to > y else end - 14
        yield from self._line([(x, y), (middle, y), (middle, to), (end, to)] if y != to else [(x, y), (end, to)])
        beside = middle if to > y else x
        yield text(beside + 6, max(y, to) + (16 if shift > 0 else -5), words, size=11)

    def _line(self, points: list[tuple[float, float]]) -> Iterator[str]:
        listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{listed}" fill="none" stroke="currentColor" stroke-opacity="0.6"/>'
        yield _head(points[-2], points[-1])
        if self.both_ways:
            yield _head(points[1], points[0])


def _head(before: tuple[float, float], at: tuple[float, float]) -> str:
    """The head of an arrow that ends at a point."""
    (x, y), (dx, dy) = at, (at[0] - before[0], at[1] - before[1])
    long = max(abs(dx), abs(dy)) or 1.0
    dx, dy = dx / long, dy / long
    corners = [(x, y), (x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx)]
    return f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}" fill-opacity="0.75"/>'


def _drawn(box: Box, frame: tuple[float, float, float, float]) -> Iterator[str]:
    x, y, wide, tall = frame
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" rx="5" fill="{box.colour}" fill-opacity="0.16" '
        f'stroke="{box.colour}"><title>{escape(" ".join(box.lines))}</title></rect>'
    )
    for number, line in enumerate(box.lines):
        yield text(x + wide / 2, y + 19 + number * _LINE, line, anchor="middle")


@dataclass(frozen=True)
class Messages:
    """Who tells whom what, from top to bottom: actors in columns, and messages as from, to, words."""

    title: str
    actors: Sequence[str]
    messages: Sequence[tuple[int, int, str]]

    def svg(self) -> str:
        """The picture, whose texts take the colour of the page."""
        room, foot = 150.0, 78 + 30.0 * len(self.messages)
        parts = []
        for number, words in enumerate(self.actors):
            x = 75 + room * number
            parts.append(f'<path d="M{x:g} 60V{foot:g}" stroke="currentColor" stroke-opacity="0.3"/>')
            for line, part in enumerate(words.split("|")):
                parts.append(text(x, 38 + 14 * line, part, size=11, anchor="middle"))
        for number, (start, stop, words) in enumerate(self.messages):
            a, b, y = 75 + room * start, 75 + room * stop, 84 + 30.0 * number
            parts.append(f'<path d="M{a:g} {y:g}H{b:g}" stroke="currentColor" stroke-opacity="0.6"/>')
            parts.append(_head((a, y), (b, y)))
            parts.append(text((a + b) / 2, y - 5, words, size=11, anchor="middle"))
        return picture(self.title, foot + 6, parts, room * len(self.actors))
