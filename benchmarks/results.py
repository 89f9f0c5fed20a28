"""What ``bench.py`` has measured: a file of JSON, tables for people, and a picture of the ratios.

The file holds, for each suite that was run, the machine, the load before, the command, and the lines of JSON that the benchmark has
printed as they were, so that other tools can read every figure.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

#: Raised when older files could be misread.
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Column:
    """A column of a suite's table.

    Attributes:
        title: what stands above it.
        text: a template of ``str.format`` for a line of the benchmark, or the key of one of its values. Where the line lacks what
            it asks for, the cell is a dash.
    """

    title: str
    text: str

    def cell(self, line: Mapping[str, Any]) -> str:
        """Return the cell of one line."""
        template = self.text if "{" in self.text else "{" + self.text + "}"
        asked = re.findall(r"\{(\w+)", template)
        if any(line.get(key) is None for key in asked):
            return "–"
        return template.format(**line)


@dataclass(frozen=True)
class Suite:
    """A benchmark that the runner knows.

    Attributes:
        name: by which ``--only`` asks for it, and the block of the page that shows it.
        title: for people.
        script: in this folder; it prints a line of JSON for each case.
        words: arguments of the whole run.
        quick: those of the quick run; None where it is left out there.
        columns: of its table.
        bound: figures that the case should not exceed, by case and key, for the table's last column.
        python: of an environment that has what the peer needs, relative to the repository; None: the one that runs this.
    """

    name: str
    title: str
    script: str
    words: tuple[str, ...]
    quick: tuple[str, ...] | None
    columns: tuple[Column, ...]
    bound: Mapping[str, tuple[str, float]]
    python: str | None = None


def machine() -> dict[str, Any]:
    """Return what figures depend on besides the code."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "version": metadata.version("smp-estimator"),
    }


def _processor() -> str:
    found = (
        re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if os.path.exists("/proc/cpuinfo")
        else None
    )
    return found[1].strip() if found else platform.processor() or platform.machine()


def lines_of(printed: str) -> list[dict[str, Any]]:
    """Return the lines of JSON objects in the output of a benchmark."""
    found = []
    for line in printed.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # another program's line
    return found


def read(path: Path) -> dict[str, Any]:
    """Return the results of former runs; none if there is no file.

    Raises:
        SystemExit: the file has another format.
    """
    if not path.exists():
        return {"format": FORMAT_VERSION, "suites": {}}
    results = json.loads(path.read_text())
    if results.get("format") != FORMAT_VERSION:
        raise SystemExit(
            f"{path} has format {results.get('format')}, this program writes {FORMAT_VERSION}: name another file"
        )
    return results


def table(suite: Suite, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return the suite's table in Markdown, without the columns that no line fills."""
    cells = [[column.cell(line) for line in lines] for column in suite.columns]
    kept = [index for index, column in enumerate(cells) if set(column) != {"–"}]
    titles = [suite.columns[index].title for index in kept]
    rows = [[cells[index][number] for index in kept] for number in range(len(lines))]
    if suite.bound:
        titles.append("aim")
        for row, line in zip(rows, lines, strict=True):
            row.append(_aim(suite, line))
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _aim(suite: Suite, line: Mapping[str, Any]) -> str:
    if (wanted := suite.bound.get(line.get("case", ""))) is None:
        return "–"
    key, most = wanted
    return f"≤ {most:g}: {'met' if line[key] <= most else 'missed'}"


def section(suite: Suite, result: Mapping[str, Any]) -> str:
    """Return a suite's section of the page: the command, the machine, the table."""
    of = result["machine"]
    on = f"{of['cores']} × {of['processor']}" + (f", {of['gpu']}" if of["gpu"] else "")
    head = f"`{result['command']}`, {result['date']}, {on}, torch {of['torch']}, load {result['load']:.1f} before:"
    return "\n".join([head, "", *table(suite, result["lines"]), ""])


def begin(name: str) -> str:
    """Return the mark before a suite's block in the page."""
    return f"<!-- the following is written by benchmarks/bench.py: {name} -->\n"


END = "<!-- until here -->\n"


def filled(page: str, suites: Sequence[Suite], results: Mapping[str, Any]) -> str:
    """Return the page with the block of each suite that has a result.

    Raises:
        SystemExit: a suite has a result and the page no block for it.
    """
    for suite in suites:
        if suite.name not in results["suites"]:
            continue
        before, mark, rest = page.partition(begin(suite.name))
        if not mark:
            raise SystemExit(f"the page lacks the line {begin(suite.name).strip()}")
        _, end, after = rest.partition(END)
        page = before + mark + section(suite, results["suites"][suite.name]) + end + after
    return page


def _name(line: Mapping[str, Any]) -> str:
    """Return the label of a row of the picture."""
    over = f", over {line['transport']}" if line.get("transport") else ""
    return f"{line['case']} ÷ {line['peer']}{over}"


#: Seen on light pages and on dark ones.
_GRID = "#8b949e"


def draw(path: Path, suites: Sequence[Suite], results: Mapping[str, Any]) -> None:
    """Draw every ratio to a peer as a dot with its quartiles, beside the line where both take the same time.

    The drawing has no ground, and its ink is that of light or dark pages, as the reader's scheme is.

    Args:
        path: ends in ``.svg``.
        suites: in the order in which they are drawn, from above.
        results: of a file.
    """
    from smp_estimator.figures.matplotlib_figure import DARK, LIGHT, figure_for
    from smp_estimator.figures.svg import colour

    rows = [
        (index, suite, line)
        for index, suite in enumerate(suites)
        for line in results["suites"].get(suite.name, {"lines": []})["lines"]
        if line.get("time_ratio") is not None
    ]
    inches = 1.1 + 0.3 * len(rows)
    figure = figure_for(path, 9, inches, LIGHT)
    axes = figure.add_axes((0.42, 0.55 / inches, 0.54, 1 - 0.75 / inches), facecolor="none")
    for height, (index, _, line) in enumerate(reversed(rows)):
        low, high = line.get("ratio_quartiles") or (line["time_ratio"],) * 2
        axes.plot([low, high], [height, height], color=colour(index), linewidth=3, alpha=0.5)
        axes.plot([line["time_ratio"]], [height], "o", color=colour(index))
    axes.axvline(1.0, color=LIGHT.ink, linewidth=1)
    axes.set_yticks(range(len(rows)), [_name(line) for _, _, line in reversed(rows)])
    axes.set_xlim(left=0)
    axes.set_xlabel("time ÷ the peer's: median and quartiles; left of the line is faster", color=LIGHT.ink)
    axes.tick_params(colors=LIGHT.ink, labelsize=8)
    axes.grid(axis="x", color=_GRID, linewidth=0.5)
    for side in axes.spines.values():
        side.set_color(_GRID)
    figure.savefig(path, transparent=True)
    drawn = path.read_text(encoding="utf-8").replace(LIGHT.ink, "currentColor")
    schemes = f"<style>svg{{color:{LIGHT.ink}}}@media(prefers-color-scheme:dark){{svg{{color:{DARK.ink}}}}}</style>"
    # Without the prologue of a file of its own, it may also stand inside a page of HTML.
    drawn = re.sub(r'(<svg[^>]*?) width="(\w+)" height="[\w.]+"', r'\1 style="width:100%;max-width:\2"', drawn)
    path.write_text(re.sub(r"(<svg[^>]*>)", rf"\1{schemes}", drawn[drawn.index("<svg") :], count=1), encoding="utf-8")
