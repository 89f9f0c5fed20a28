"""The table in ``docs/stock-images.md``, from that of the package: ``python tests/support/documents/stock_image_page.py``."""

from __future__ import annotations

from pathlib import Path

from smp_estimator.cli.commands.images import cells
from smp_estimator.cloud import image_table

PAGE = Path(__file__).parents[3] / "docs" / "stock-images.md"

_BEGIN = "<!-- the following is written by tests/support/documents/stock_image_page.py -->\n"
_END = "<!-- until here -->\n"

_COLUMNS = ("image", "PyTorch", "Python", "CUDA", "patched until", "mpi4py", "SMDDP", "sources")


def table() -> str:
    """All rows and their sources, as Markdown."""
    lines = [_COLUMNS, ["---"] * len(_COLUMNS)]
    lines += [[f"`{row.name}`", *cells(row), ", ".join(row.sources)] for row in image_table.images()]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    said = [
        f"- *{name}*: {source['what']}, {'commit' if len(source['at']) == 40 else 'version'} {source['at']}, {source['date']}"
        for name, source in image_table.sources().items()
    ]
    return "\n".join([rows, "", "Sources:", "", *said, ""])


def written(page: str) -> str:
    """The page with the table of now."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks the lines between which the table stands: {_BEGIN!r} and {_END!r}")
    return f"{before}{begin}{table()}{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
