"""Compiles what workers import, each worker a share: in a new copy of the repository, each would compile all of it."""

from __future__ import annotations

import contextlib
import importlib.util
import py_compile
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


def compile_share(config: pytest.Config, number: int, count: int) -> None:
    """Compile every ``count``-th file of the repository from ``number`` on, if it has changed since it was compiled."""
    if sys.dont_write_bytecode:
        return
    files = [path for folder in ("tests", "container", "smp_estimator") for path in (ROOT / folder).rglob("*.py")]
    compile_files(config, sorted(files)[number::count])


def compile_files(config: pytest.Config, files: Iterable[Path]) -> None:
    """Compile files as they are imported: those of tests with what pytest adds to their assertions."""
    from _pytest.assertion import rewrite

    state = config.stash.get(rewrite.assertstate_key, None)
    if state is None:  # assertions stay as they are written
        return
    for file in files:
        if file.name != "conftest.py" and not file.name.startswith("test_"):
            if not _is_newer(Path(importlib.util.cache_from_source(str(file))), file):
                with contextlib.suppress(OSError):  # a folder that nobody may write to
                    py_compile.compile(str(file), doraise=False, quiet=2)
            continue
        compiled = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if not _is_newer(compiled, file):
            try:
                source, code = rewrite._rewrite_test(file, config)
            except SyntaxError:
                continue  # collection says where
            rewrite.try_makedirs(compiled.parent)
            rewrite._write_pyc(state, code, source, compiled)


def _is_newer(compiled: Path, file: Path) -> bool:
    return compiled.exists() and compiled.stat().st_mtime >= file.stat().st_mtime
