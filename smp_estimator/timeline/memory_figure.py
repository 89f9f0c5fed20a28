"""The memory of ranks over a step, by what holds it, as areas in SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from smp_estimator.figures.svg import WIDTH, colour, legend, picture, text

if TYPE_CHECKING:
    from smp_estimator.timeline.memory import MemoryCurve

#: Height of a rank's area, and the room for its figures at the left.
_HIGH, _LEFT = 90, 84

#: Points of a curve: a notebook keeps its pictures.
_POINTS = 160

#: More ranks are left out, those with the lowest peaks.
_MOST_CURVES = 8


def memory_areas(title: str, curves: Sequence[MemoryCurve]) -> str:
    """Return a picture of several ranks, one below another on one scale of bytes, as an ``svg`` element."""
    highest = sorted(curves, key=lambda curve: -curve.peak[1])[:_MOST_CURVES]
    shown = [curve.thinned(_POINTS) for curve in curves if curve in highest]
    top = max(curve.peak[1] for curve in shown) or 1
    owners = list(dict.fromkeys(owner for curve in shown for owner in curve.ordered))
    fills = {owner: colour(number) for number, owner in enumerate(owners)}
    parts: list[str] = []
    for number, curve in enumerate(shown):
        base = 28 + (number + 1) * (_HIGH + 24)
        parts.append(text(4, base - _HIGH + 4, f"{curve.peak[1] / 2**30:.2f} GiB", size=11))
        parts.append(text(_LEFT, base - _HIGH - 4, _said(curve), size=11))
        parts += _areas(curve, fills, base, top)
    foot = 28 + len(shown) * (_HIGH + 24) + 20
    parts += legend(foot, ((fills[owner], owner) for owner in owners), _LEFT)
    left_out = len(curves) - len(shown)
    if left_out:
        parts.append(text(_LEFT, foot + 18, f"{left_out} more with lower peaks are left out", size=11))
    return picture(title, foot + 26, parts)


def _said(curve: MemoryCurve) -> str:
    at = f", most in {curve.peak_owner}" if curve.peak_owner else ""
    if curve.device_bytes is None:
        return f"{curve.label}{at}"
    return f"{curve.label}{at}: {curve.peak[1] / curve.device_bytes:.0%} of {curve.device_bytes / 2**30:.0f} GiB"


def _areas(curve: MemoryCurve, fills: dict[str, str], base: float, top: int) -> Iterable[str]:
    first, last = curve.seconds[0], curve.seconds[-1]
    scale = (WIDTH - _LEFT - 8) / ((last - first) or 1.0)
    places = [_LEFT + (second - first) * scale for second in curve.seconds]
    below = [0] * len(places)
    for owner in curve.ordered:
        above = [low + held for low, held in zip(below, curve.owners[owner], strict=True)]
        outline = _steps(places, above, base, top) + list(reversed(_steps(places, below, base, top)))
        most = max(curve.owners[owner])
        if most:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
            tip = f"{owner}: at most {most / 2**30:.2f} GiB"
            yield f'<polygon points="{points}" fill="{fills[owner]}"><title>{tip}</title></polygon>'
        below = above


def _steps(places: Sequence[float], sizes: Sequence[int], base: float, top: int) -> list[tuple[float, float]]:
    """Return the points of a line that stays at each size until the next place."""
    points: list[tuple[float, float]] = []
    for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
        until = places[number + 1] if number + 1 < len(places) else place
        height = base - size / top * _HIGH
        points += [(place, height), (until, height)]
    return points
