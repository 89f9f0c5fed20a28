"""Which files of the repository import which: packages, tests and what tests share."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The packages of this project, by name.
PACKAGES = {
    "smp_estimator": ROOT / "smp_estimator",
    "smp_launch": ROOT / "container" / "smp_launch",
    "smp_emulation": ROOT / "container" / "smp_emulation",
    "smp_runtime": ROOT / "container" / "smp_runtime",
    "smdistributed": ROOT / "container" / "smdistributed",
    "smp_tools": ROOT / "container" / "smp_tools",
    "smp_integrations": ROOT / "container" / "smp_integrations",
    "torch_sagemaker": ROOT / "container" / "torch_sagemaker",
    "smp_transformer_engine": ROOT / "container" / "smp_transformer_engine",
    "smp_version2": ROOT / "container" / "smp_version2",
    "smp_records": ROOT / "container" / "smp_records",
    "smp_config": ROOT / "container" / "smp_config",
}

#: Folders of Python, each with the one from which its modules are imported.
_FOLDERS = {"container": "container", "smp_estimator": ".", "tests": "tests", "benchmarks": "benchmarks"}
#: A module, or something in it, as tests name it in a string.
_DOTTED = re.compile(r"\b(?:smp_\w+|smdistributed|torch_sagemaker)(?:\.\w+)+")
#: Imports as they are written, in scripts that stand in strings too.
_IMPORT = re.compile(r"^[ \t]*import[ \t]+([^\n#]+)", re.MULTILINE)
_FROM = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]+)", re.MULTILINE)
_COMMENT = re.compile(r"#[^\n]*")


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Have memory not looked through for what is made in the block, now or later: that takes longer than to parse."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@functools.cache
def parse(path: Path) -> ast.Module:
    """Return the parsed file, once for all who ask."""
    with _kept():
        return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all that the parsed file is made of; to walk through it takes as long as to parse it."""
    with _kept():
        return list(ast.walk(parse(path)))


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node. Expressions are nine tenths of a file, and no import is inside one."""
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        for statement in getattr(tree, name, ()):
            yield statement
            yield from _statements(statement)


def imported_names(path: Path) -> Iterator[str]:
    """Yield the names of all imports: deferred ones and those for type checkers tie files together like any other."""
    for node in _statements(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _named(path: Path) -> Iterator[str]:
    """Yield the names of modules in the text, imported or in strings. To read them so takes a tenth of parsing all files."""
    text = path.read_text(encoding="utf-8")
    yield from _DOTTED.findall(text)
    for words in _IMPORT.findall(text):
        yield from (name.split()[0] for name in words.split(",") if name.strip())
    for module, words in _FROM.findall(text):
        yield module
        names = _COMMENT.sub("", words).strip("()").split(",")
        yield from (f"{module}.{name.split()[0]}" for name in names if name.strip())


@functools.cache
def modules() -> dict[str, Path]:
    """Return all files of Python by the names under which they are imported; a test file by its path."""
    found = {}
    for folder, base in _FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / base).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def imports() -> dict[Path, set[Path]]:
    """Return by file the others that it imports, or names in a string."""
    known = modules()
    graph: dict[Path, set[Path]] = {}
    for path in known.values():
        found = set()
        for name in set(_named(path)):
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                found.add(known[name])
        graph[path] = found - {path}
    return graph


def files_of(package: str) -> list[Path]:
    """Return the files of a package."""
    return [path for path in PACKAGES[package].rglob("*.py") if "__pycache__" not in path.parts]
