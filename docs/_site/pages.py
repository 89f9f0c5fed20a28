"""What mkdocs needs to know of this repository: pages that lie outside ``docs/``, and links to files that are no pages.

Documents are written for whoever reads them in the repository. README, CONTRIBUTING, CHANGELOG and the notebooks become pages of
the site; a file of Python, YAML or JSON that a page links to becomes a page with its text, so that no link of the site leads
nowhere. Drawings become part of the page, whose colour their texts then take, in either scheme.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]

#: Documents outside ``docs/``, by the name of their page.
PAGES = {
    "index.md": "README.md",
    **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md")},
    **{f"examples/{path.stem}.md": f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.ipynb"))},
}

#: Of a drawing that stands in a line of its own.
_DRAWING = re.compile(r"^!\[([^\]]+)\]\(([^)#\s]+\.svg)\)$", re.MULTILINE)
#: Its colours where no page is around it.
_SCHEMES = re.compile(r"<style>.*?</style>")

_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_LANGUAGES = {".py": "python", ".json": "json", ".ipynb": "json", ".yaml": "yaml", ".sbatch": "bash", ".cfg": "ini"}

#: Where the texts of linked files are put.
_FOLDER = "files"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that ``docs/`` does not hold."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(
            File.generated(config, page, content=_notebook(text, source) if source.endswith(".ipynb") else text)
        )
    linked = {path for file in files.documentation_pages() for path in _outside(file.src_uri, file.content_string)}
    for path in sorted(linked):
        files.append(File.generated(config, _text_page(path), content=_text(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links to files of the repository into links to their pages."""
    if page.file.src_uri.startswith(f"{_FOLDER}/"):
        return markdown

    def relinked(found: re.Match[str]) -> str:
        target = _page_of(_in_repository(page.file.src_uri, found[2])) if _is_relative(found[2]) else None
        if target is None:
            return found[0]
        here = posixpath.dirname(page.file.src_uri)
        return f"{found[1]}{posixpath.relpath(target, here or '.')}{found[3] or ''}{found[4]}"

    def drawn(found: re.Match[str]) -> str:
        drawing = ROOT / _in_repository(page.file.src_uri, found[2])
        svg = _SCHEMES.sub("", drawing.read_text(encoding="utf-8").strip())
        return f'<div class="drawing" aria-label="{html.escape(found[1])}">{svg}</div>'

    return _LINK.sub(relinked, _DRAWING.sub(drawn, markdown))


def _notebook(text: str, name: str) -> str:
    """Return a notebook as a page: its texts, its code with what that printed, and where it lies."""
    cells = [
        "".join(cell["source"]) if cell["cell_type"] == "markdown" else _code(cell)
        for cell in json.loads(text)["cells"]
    ]
    return "\n\n".join([cells[0], f"*This page is `{name}`, which runs in Jupyter.*", *cells[1:], ""])


def _code(cell: dict[str, Any]) -> str:
    blocks = [f"```python\n{''.join(cell['source']).rstrip()}\n```"]
    return "\n\n".join(blocks + [_output(output) for output in cell["outputs"]])


def _output(output: dict[str, Any]) -> str:
    """Return what a cell has shown: a table or picture as it is, anything else as text."""
    data = output.get("data", {})
    page = "".join(data.get("text/html", ""))
    if page and not page.startswith("<progress"):  # a bar that is full
        return f'<div class="drawing">{" ".join(page.split())}</div>'
    text = "".join(output.get("text", "") or data.get("text/plain", "")).strip("\n")
    return f"```\n{text}\n```" if text else ""


def _is_relative(link: str) -> bool:
    return "://" not in link and not link.startswith(("/", "mailto:"))


def _in_repository(page: str, link: str) -> str:
    """Return the file, from the repository's root, that a page of the site links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(PAGES.get(page, f"docs/{page}")), link))


def _page_of(path: str) -> str | None:
    """Return the page of the site that shows a file, or None; mkdocs then reports it."""
    of_document = {source: page for page, source in PAGES.items()}
    if path in of_document:
        return of_document[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return _text_page(path) if (ROOT / path).is_file() else None


def _outside(page: str, text: str) -> set[str]:
    """Return the files outside ``docs/`` that a page links to and that are no documents."""
    found = {_in_repository(page, link) for _, link, _, _ in _LINK.findall(text) if _is_relative(link)}
    return {path for path in found if (ROOT / path).is_file() and path not in PAGES.values() and path[:5] != "docs/"}


def _text_page(path: str) -> str:
    return f"{_FOLDER}/{path}.md"


def _text(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    language = _LANGUAGES.get(Path(path).suffix, "text")
    # Pages of code are for whoever follows a link: a search is for documents, and the navigation would hide it.
    head = "---\nsearch:\n  exclude: true\nhide: [navigation]\n---\n"
    return f"{head}# {path}\n\n{fence}{language}\n{text}\n{fence}\n"
