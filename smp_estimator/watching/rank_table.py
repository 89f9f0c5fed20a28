"""A table of all ranks: how each spends its steps, its memory, and how busy its processor and its GPU are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from smp_estimator.watching.stragglers import Straggler
    from smp_records.records import PaceRecord

#: Rows of a table in a notebook or below a progress bar; of more ranks those with the most work of their own are shown.
_MOST_ROWS = 16


@dataclass(frozen=True)
class RankRow:
    """A rank. Parts are parts of its time; what is left of 1 is what it did before its first step.

    Attributes:
        step: begun.
        step_seconds: from one step to the next; None while none was begun.
        compute: part in which it worked in steps and updates.
        waiting: part in which it waited for other ranks: for its pipeline, and in collectives longer than the rank of its stage
            that came last.
        communication: part in collectives without that.
        data: part between steps, in which the script mostly loads data.
        saving: part in checkpoints.
        cpu_cores: that were busy for it.
        gpu_share: part of the time in which its GPU did something.
    """

    rank: int
    host: str
    stage: int
    step: int
    step_seconds: float | None
    compute: float
    waiting: float
    communication: float
    data: float
    saving: float
    memory_bytes: int | None
    cpu_cores: float | None
    gpu_share: float | None


def rows_of(records: Iterable[PaceRecord]) -> list[RankRow]:
    """Return one row per rank, sorted by rank."""
    known = sorted((record for record in records if record.seconds > 0), key=lambda record: record.rank)
    least: dict[int, float] = defaultdict(lambda: 1.0)
    for record in known:
        least[record.stage] = min(least[record.stage], record.collectives / record.seconds)
    rows = []
    for record in known:
        in_collectives = record.collectives / record.seconds
        rows.append(
            RankRow(
                rank=record.rank,
                host=record.host,
                stage=record.stage,
                step=record.step,
                step_seconds=record.seconds / record.steps if record.steps else None,
                compute=record.compute / record.seconds,
                waiting=record.waiting / record.seconds + in_collectives - least[record.stage],
                communication=least[record.stage],
                data=record.data / record.seconds,
                saving=record.saving / record.seconds,
                memory_bytes=record.memory_bytes,
                cpu_cores=record.cpu_cores,
                gpu_share=record.gpu_share,
            )
        )
    return rows


#: The columns, and those with words in place of numbers.
_HEADS = "rank host stage step ms/step compute waiting comm. data saving memory CPU GPU".split()
_WORDS = {"host"}


def cells_of(row: RankRow) -> list[str]:
    """Return the row as text, in the order of the columns."""
    parts = (row.compute, row.waiting, row.communication, row.data, row.saving)
    return [
        str(row.rank),
        row.host,
        str(row.stage),
        str(row.step),
        _cell(row.step_seconds, "{:,.1f}", 1e3),
        *map("{:.0%}".format, parts),
        _cell(row.memory_bytes, "{:.2f} GiB", 2**-30),
        _cell(row.cpu_cores, "{:.2f}"),
        _cell(row.gpu_share, "{:.0%}"),
    ]


def _cell(value: float | None, form: str, factor: float = 1.0) -> str:
    """Return a number in its column's form, or a dash if it is not known."""
    return "–" if value is None else form.format(value * factor)


def table_of(rows: Iterable[RankRow], title: str = "") -> Table:
    """Return the rows as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left")
    for head in _HEADS:
        table.add_column(head, justify="left" if head in _WORDS else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in cells_of(row)))
    return table


def html_of(rows: Iterable[RankRow]) -> str:
    """Return the rows as an HTML table for a notebook."""
    head = "".join(f"<th>{escape(name)}</th>" for name in _HEADS)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in cells_of(row))
        body += f"<tr>{cells}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def most_worth_showing(rows: list[RankRow]) -> list[RankRow]:
    """Return the rows to show, sorted by rank: all if they are few, else those with the most work of their own."""
    chosen = sorted(rows, key=lambda row: -(row.compute + row.data + row.saving))[:_MOST_ROWS]
    return sorted(chosen, key=lambda row: row.rank)


def json_of(name: str, rows: Iterable[RankRow], stragglers: Iterable[Straggler]) -> Mapping[str, Any]:
    """Return the rows and stragglers as a mapping for programs; names and units are those of the fields."""
    return {
        "job": name,
        "ranks": [asdict(row) for row in rows],
        "stragglers": [asdict(straggler) for straggler in stragglers],
    }
