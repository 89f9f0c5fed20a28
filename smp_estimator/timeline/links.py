"""Bytes that go over each link in a step: between which ranks or hosts, by what, and a picture of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from smp_config import ConfigError
from smp_estimator.figures.matplotlib_figure import LIGHT, Theme, colour_axes, figure_for, save

#: Squares of more ends than this carry no numbers.
_NUMBERED = 16

#: Frames around more are thin, or they would hide the squares.
_FRAMED = 32

#: Part of full colour that the faintest square has: it must be visible on a dark page too.
_FAINTEST = 0.3

#: Ends of more squares are thinner than a dot.
_MOST_ENDS = 256

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


@dataclass(frozen=True)
class LinkTraffic:
    """The messages from one end to another in a step.

    Attributes:
        source, target: a stage, a rank or a host, as it is to be called.
        sent_bytes: of all messages.
        messages: how many; of a collective, each call.
        what: that was sent: ``"activations"``, ``"all_reduce of gradients"``, ….
        same_host: whether it stays inside a host.
    """

    source: str
    target: str
    sent_bytes: int
    messages: int
    what: str = ""
    same_host: bool = True


def format_bytes(size: float) -> str:
    """Return a size as text such as ``"3.1 GB"``, in the unit with one to three digits before the point."""
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), _UNITS[-1])
    return f"{size / unit:.3g} {name}"


def link_table(links: Sequence[LinkTraffic]) -> Table:
    """Return a table with one row per link and kind, sorted by bytes, the largest first."""
    table = Table(title="bytes per link in a step", title_justify="left")
    for name in ("from", "to", "link", "what"):
        table.add_column(name)
    for name in ("bytes", "messages", "each"):
        table.add_column(name, justify="right")
    for link in sorted(links, key=lambda one: -one.sent_bytes):
        table.add_row(
            link.source,
            link.target,
            "inside a host" if link.same_host else "between hosts",
            link.what,
            format_bytes(link.sent_bytes),
            f"{link.messages:,}",
            format_bytes(link.sent_bytes / link.messages) if link.messages else "",
        )
    return table


def save_link_picture(links: Sequence[LinkTraffic], path: str | Path, theme: Theme = LIGHT) -> Path:
    """Draw the bytes from each end that sends (a row) to each that receives (a column) as squares.

    The fuller a square, the more bytes, by powers of ten. One with a frame goes between hosts.

    Raises:
        ConfigError: no links, too many ends, or a format that matplotlib does not know.
        PackageMissing: matplotlib is not installed.
    """
    sent: dict[tuple[str, str], int] = {}
    between: set[tuple[str, str]] = set()
    for link in links:
        pair = link.source, link.target
        sent[pair] = sent.get(pair, 0) + link.sent_bytes
        if not link.same_host:
            between.add(pair)
    rows = sorted({source for source, _ in sent}, key=_in_numbers)
    # Groups of ranks send nothing themselves; they stand behind those who do.
    columns = sorted({target for _, target in sent}, key=lambda end: (end not in rows, _in_numbers(end)))
    count = max(len(rows), len(columns))
    if not any(sent.values()):
        raise ConfigError(
            "there are no bytes per link to draw: no rank sends anything in the step, or no link was given",
            code="SMP116",
        )
    if (ends := len({*rows, *columns})) > _MOST_ENDS:
        raise ConfigError(
            f"the links have {ends} ends, too many rows for one picture (most: {_MOST_ENDS}); draw stages or hosts instead "
            "of ranks, or use the table",
            code="SMP116",
        )
    # From a thousandth of the most on; less is drawn as nothing next to it.
    most = max(sent.values())
    least = max(1.0, min(size for size in sent.values() if size), most / 1000)
    each = min(0.62, 9.0 / count)
    # No narrower than the title.
    figure = figure_for(path, max(5.6, each * len(columns) + 1.6), max(1.2, each * len(rows)) + 1.4, theme)
    axes = colour_axes(figure.add_subplot(), theme)
    for (source, target), size in sent.items():
        if size:
            part = math.log(size / least) / math.log(most / least) if most > least else 1.0
            depth = _FAINTEST + (1 - _FAINTEST) * max(0.0, part)
            square = _Square(rows.index(source), columns.index(target), size, depth)
            square.draw(axes, theme, count, is_framed=(source, target) in between)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_aspect("equal", anchor="W")
    for set_ticks, names, more in (
        (axes.set_xticks, columns, {"rotation": 45, "ha": "right"}),
        (axes.set_yticks, rows, {}),
    ):
        shown = range(0, len(names), -(-len(names) // 32))
        set_ticks(shown, [names[at] for at in shown], fontsize=7, **more)
    axes.set_xlabel("to", color=theme.ink)
    axes.set_ylabel("from", color=theme.ink)
    framed = f", {format_bytes(sum(sent[pair] for pair in between))} of them between hosts (framed)" if between else ""
    axes.set_title(
        f"bytes per link in a step: {format_bytes(sum(sent.values()))}{framed}", fontsize=9, color=theme.ink, loc="left"
    )
    return save(figure, path)


def _in_numbers(end: str) -> list[tuple[str, int]]:
    """Return a sort key that puts ``stage 2`` before ``stage 10``."""
    parts: list[tuple[str, int]] = []
    for word in end.split():
        parts.append(("", int(word)) if word.isdecimal() else (word, 0))
    return parts


@dataclass(frozen=True)
class _Square:
    """One pair of ends; ``strength`` is the part of full colour."""

    row: int
    column: int
    size: int
    strength: float

    def draw(self, axes: Any, theme: Theme, count: int, *, is_framed: bool) -> None:
        """Draw the square, with its bytes as text if there are few enough rows and columns (``count``)."""
        from matplotlib.patches import Rectangle

        edge, width = theme.warning if is_framed else "none", 1.2 if count <= _FRAMED else 0.4
        corner = self.column - 0.46, self.row - 0.46
        axes.add_patch(
            Rectangle(corner, 0.92, 0.92, facecolor=("#0072b2", self.strength), edgecolor=edge, linewidth=width)
        )
        if count <= _NUMBERED:
            ink = "#ffffff" if self.strength > 0.55 else theme.ink
            text = format_bytes(self.size).replace(" ", "\n")
            axes.text(self.column, self.row, text, ha="center", va="center", fontsize=6.5, color=ink)


__all__ = ["LinkTraffic", "format_bytes", "link_table", "save_link_picture"]
