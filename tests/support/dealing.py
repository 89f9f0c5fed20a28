"""How xdist deals test files out to its workers."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
#: What a file has in it whose ranks import Transformers, directly or by models of ``tests/support``.
_TRANSFORMERS = re.compile(
    r"\branks\b[\s\S]*transformers|transformers[\s\S]*\branks\b|\bfrom crossings\.|\btiny_families\b"
)


class FewImports(LoadFileScheduling):  # type: ignore[misc]
    """Each file to one worker, and to the same one all whose ranks import Transformers: these take seconds on each rank."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return "Transformers" if _imports_transformers(file) else file


@functools.cache
def _imports_transformers(file: str) -> bool:
    path = ROOT / file
    return path.is_file() and _TRANSFORMERS.search(path.read_text(encoding="utf-8")) is not None
