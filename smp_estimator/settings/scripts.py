"""Static inspection of the user's scripts: the entry point, and the files beside it that it imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Limits of a search through imported files, so that it is quick in any folder.
_MOST_SCRIPTS = 200
_LARGEST_SCRIPT_BYTES = 1_000_000


def first_use(pattern: re.Pattern[str], entry_point: Any, source_dir: Any) -> str | None:
    """Return ``file.py (name)`` of the first name in the job's code that matches as a whole.

    Comments and strings do not count, nor files that the entry point does not import, directly or through others.
    """
    for path, tree in _scripts(entry_point, source_dir):
        for node in ast.walk(tree):
            name = ""
            if isinstance(node, ast.Name):
                name = node.id
            elif isinstance(node, ast.Attribute):
                name = node.attr
            if pattern.fullmatch(name):
                return f"{path.name} ({name})"
    return None


def _scripts(entry_point: Any, source_dir: Any) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the entry point and the files that it imports from its own folder and ``source_dir``, each once."""
    has_folder = isinstance(source_dir, str)
    is_uploaded = has_folder and source_dir.startswith("s3://")
    if not isinstance(entry_point, str) or is_uploaded:
        return
    script = Path(entry_point).expanduser()
    folder = Path(source_dir).expanduser() if has_folder else script.parent
    first = folder / script if source_dir else script
    waiting, known = [first], {first}
    while waiting and len(known) <= _MOST_SCRIPTS:
        path = waiting.pop(0)
        tree = _parsed(path)
        if tree is None:
            continue
        yield path, tree
        for found in _imported(tree, path.parent, (first.parent, folder)):
            if found not in known:
                known.add(found)
                waiting.append(found)


def _parsed(path: Path) -> ast.Module | None:
    try:
        if path.suffix != ".py" or path.stat().st_size > _LARGEST_SCRIPT_BYTES:
            return None
        return ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return None


def _imported(tree: ast.Module, here: Path, roots: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files that the code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(alias.name, roots)
        elif isinstance(node, ast.ImportFrom):
            yield from _imported_from(node, here, roots)


def _imported_from(node: ast.ImportFrom, here: Path, roots: tuple[Path, ...]) -> Iterator[Path]:
    folders = (here, *here.parents)
    # Each further dot of a relative import leads one folder up; there may be no such folder.
    base = folders[node.level - 1 : node.level] if node.level else roots
    for alias in node.names:
        name = f"{node.module}.{alias.name}" if node.module else alias.name
        yield from _files(name, base)


def _files(name: str, roots: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files of a dotted name: its module, and the packages around it.

    The last part may be a name inside a module.
    """
    parts = name.split(".")
    for root in dict.fromkeys(roots):
        for count in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:count])
            candidates = (place.with_suffix(".py"), place / "__init__.py")
            for path in candidates:
                if path.is_file():
                    yield path
