"""Shared parts of the notebook pictures: frame, texts, boxes and colors.

The colors are distinguishable on light and on dark backgrounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

#: Width of a picture in its own units; a notebook scales it to the width of its page.
WIDTH = 960

#: Distinct also for people who see few colours (Okabe and Ito 2008), on light and dark backgrounds.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a900", "#8c8c8c")


def colour(number: int) -> str:
    """Return the color of item ``number`` of a picture."""
    return COLOURS[number % len(COLOURS)]


def ink_on(fill: str) -> str:
    """Return black or white, whichever is easier to read on a color (relative luminance of WCAG 2)."""
    red, green, blue = (int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))
    light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#000" if light > 0.179 else "#fff"


def picture(title: str, height: float, parts: Iterable[str], width: float = WIDTH) -> str:
    """Return an ``svg`` element with its title at the top; its texts use the color of the page."""
    # No wider than it was made for: a few boxes would fill the page.
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" style="width:100%;max-width:{width:g}px" '
        f'role="img" font-family="sans-serif" font-size="12" fill="currentColor"><title>{escape(title)}</title>'
        f"{text(4, 16, title)}{''.join(parts)}</svg>"
    )


def text(x: float, y: float, words: str, *, size: float = 12, anchor: str = "start", ink: str = "currentColor") -> str:
    """Return a line of text; ``anchor`` sets whether it starts at the point, is centered on it, or ends there."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" fill="{ink}" pointer-events="none">'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> str:
    """Return a rectangle; ``tip`` is shown when the pointer is over it."""
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">{inner}</rect>'


def legend(y: float, entries: Iterable[tuple[str, str]], x: float = 4) -> list[str]:
    """Return a legend, colors with their meaning, in a line that begins at ``x``."""
    parts = []
    for fill, words in entries:
        parts += [box(x, y - 9, 10, 10, fill), text(x + 15, y, words, size=11)]
        x += 15 + 6.5 * len(words) + 16
    return parts


def shorten(words: str, room: float, size: float = 12) -> str:
    """Cut a text to fit into ``room`` units of width; return an empty string if not even three letters fit."""
    letters = int(room / (0.56 * size))
    if len(words) <= letters:
        return words
    return f"{words[: letters - 1]}…" if letters > 2 else ""
