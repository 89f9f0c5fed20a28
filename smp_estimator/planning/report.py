"""The contents of a plan's report: lines with labels and tables, for a terminal or as HTML for a notebook."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from smp_estimator.planning.forecast import Verdict

COLOURS = {
    Verdict.FITS: "green",
    Verdict.TIGHT: "yellow",
    Verdict.DOES_NOT_FIT: "red",
    Verdict.UNKNOWN: "blue",
}

#: Readable on the light and on the dark background of a notebook.
_HTML_COLOURS = {
    Verdict.FITS: "#2e9e4f",
    Verdict.TIGHT: "#c78a00",
    Verdict.DOES_NOT_FIT: "#d64545",
    Verdict.UNKNOWN: "#4a7fd6",
}
_LINE = "1px solid rgba(128,128,128,.35)"


@dataclass(frozen=True)
class ColouredText:
    """A text in the colour of a verdict."""

    text: str
    verdict: Verdict


Cell = str | ColouredText


@dataclass(frozen=True)
class Lines:
    """Labels, each with one or several lines of text; labels without lines are left out."""

    rows: Sequence[tuple[str, Sequence[Cell]]]


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        columns: their titles.
        numbers: which of them hold numbers, by position.
        totals: the last rows, which are set apart.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: frozenset[int] = frozenset()
    totals: Sequence[Sequence[Cell]] = ()
    title: str | None = None


Report = Sequence[Lines | Grid]


# -- on a terminal ---------------------------------------------------------------------------------------------


def as_rich(report: Report) -> Group:
    """Return the report for a rich console."""
    shown: list[RenderableType] = []
    for part in report:
        if isinstance(part, Lines):
            shown.append(_rich_lines(part))
            continue
        if part.title is not None:
            shown.append(Text(part.title, style="italic"))
        shown.append(_rich_grid(part))
    return Group(*shown)


def as_text(report: Report) -> str:
    """Return the report as plain text of 116 columns."""
    text = io.StringIO()
    Console(file=text, width=116).print(as_rich(report))
    return text.getvalue().rstrip()


def _rich_cell(cell: Cell, style: str = "") -> Text:
    return Text(cell, style=style) if isinstance(cell, str) else Text(cell.text, style=f"bold {COLOURS[cell.verdict]}")


def _rich_lines(part: Lines) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, lines in part.rows:
        for number, line in enumerate(lines):
            grid.add_row(label if number == 0 else "", _rich_cell(line))
    return grid


def _rich_grid(part: Grid) -> Table:
    table = Table()
    for number, column in enumerate(part.columns):
        justify: JustifyMethod = "right" if number in part.numbers else "left"
        table.add_column(column, justify=justify, no_wrap=number == 0)
    for row in part.rows:
        table.add_row(*map(_rich_cell, row))
    if part.totals:
        table.add_section()
    for row in part.totals:
        cells = [_rich_cell(cell, "bold") for cell in row]
        table.add_row(*cells)
    return table


# -- in a notebook ---------------------------------------------------------------------------------------------


def as_html(report: Report) -> str:
    """Return the report for a notebook: tables with their own styles, every text escaped."""
    parts = "".join(_html_lines(part) if isinstance(part, Lines) else _html_grid(part) for part in report)
    return f'<div style="max-width:72em;line-height:1.4">{parts}</div>'


def _html_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return html.escape(cell)
    return f'<b style="color:{_HTML_COLOURS[cell.verdict]}">{html.escape(cell.text)}</b>'


def _html_row(cells: Sequence[Cell], numbers: frozenset[int], style: str = "", tag: str = "td") -> str:
    found = []
    for number, cell in enumerate(cells):
        side = "right" if number in numbers else "left"
        found.append(f'<{tag} style="text-align:{side};padding:2px 12px 2px 0;{style}">{_html_cell(cell)}</{tag}>')
    return f"<tr>{''.join(found)}</tr>"


def _html_lines(part: Lines) -> str:
    rows = []
    for label, lines in part.rows:
        if lines:
            text = "<br>".join(map(_html_cell, lines))
            name = f'<td style="text-align:left;vertical-align:top;padding:2px 16px 2px 0;opacity:.7">{html.escape(label)}</td>'
            rows.append(f'<tr>{name}<td style="text-align:left;padding:2px 0">{text}</td></tr>')
    return f'<table style="border-collapse:collapse;margin:.4em 0">{"".join(rows)}</table>'


def _html_grid(part: Grid) -> str:
    title = (
        "" if part.title is None else f'<caption style="text-align:left;opacity:.7">{html.escape(part.title)}</caption>'
    )
    rows = [_html_row(part.columns, part.numbers, f"border-bottom:{_LINE}", "th")]
    rows += [_html_row(row, part.numbers) for row in part.rows]
    for number, row in enumerate(part.totals):
        rows.append(_html_row(row, part.numbers, "font-weight:bold;" + (f"border-top:{_LINE}" if number == 0 else "")))
    return f'<table style="border-collapse:collapse;margin:.6em 0">{title}{"".join(rows)}</table>'


class Shown:
    """A result that prints itself, in a terminal and in a notebook."""

    def report(self) -> Report:
        """Return the report to show."""
        raise NotImplementedError

    def __rich__(self) -> Group:
        return as_rich(self.report())

    def __str__(self) -> str:
        return as_text(self.report())

    def _repr_html_(self) -> Any:
        return as_html(self.report())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the tables in IPython, instead of the dataclass with all its fields."""
        printer.text(str(self))
