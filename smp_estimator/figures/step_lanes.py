"""A step as lanes of blocks in SVG, which notebooks show by themselves; it needs no other library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

#: In units of the picture: its width, the room for a lane's name, and a lane's height.
_WIDTH, _NAMES, _LANE = 960, 130, 24

#: More lanes are cut, with a word on how many.
_MOST_LANES = 64

#: A number is written into a block that is at least this wide.
_WIDE_ENOUGH = 11


@dataclass(frozen=True)
class Bar:
    """A block of a lane; times in seconds of the lane's clock.

    Attributes:
        mark: is written into it where there is room.
        tip: is shown when a pointer rests on it.
    """

    start: float
    stop: float
    colour: str
    mark: str
    tip: str


def lanes(title: str, rows: Sequence[tuple[str, Iterable[Bar]]], start: float, stop: float, missing: int = 0) -> str:
    """Draw named rows of bars between two times as an ``svg`` element.

    The text uses the color of the surrounding page, so it is readable on light and dark backgrounds.
    """
    scale = (_WIDTH - _NAMES - 8) / ((stop - start) or 1.0)
    height = 30 + _LANE * len(rows[:_MOST_LANES]) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="100%" role="img" '
        f'font-family="sans-serif" font-size="12" fill="currentColor"><title>{escape(title)}</title>',
        f'<text x="4" y="16">{escape(title)}</text>',
    ]
    for number, (name, bars) in enumerate(rows[:_MOST_LANES]):
        top = 28 + _LANE * number
        parts.append(f'<text x="4" y="{top + 15}">{escape(name)}</text>')
        for bar in bars:
            left, width = _NAMES + (bar.start - start) * scale, max((bar.stop - bar.start) * scale, 0.2)
            parts.append(
                f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_LANE - 4}" fill="{bar.colour}">'
                f"<title>{escape(bar.tip)}</title></rect>"
            )
            if width >= _WIDE_ENOUGH:
                parts.append(
                    f'<text x="{left + width / 2:.2f}" y="{top + 14}" text-anchor="middle" font-size="10" fill="#fff" '
                    f'pointer-events="none">{escape(bar.mark)}</text>'
                )
    left_out = len(rows) - _MOST_LANES
    foot = f"{(stop - start) * 1e3:.1f} ms; colour and number: microbatch; lighter: forward, darker: backward"
    foot += f"; {left_out} more lanes are left out" * (left_out > 0)
    parts.append(f'<text x="{_NAMES}" y="{height - 8}" font-size="11">{escape(foot)}</text></svg>')
    return "".join(parts)
