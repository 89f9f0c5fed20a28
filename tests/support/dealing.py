"""How xdist deals test files out to its workers."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
#: Files whose ranks, or who themselves, import Transformers.
TRANSFORMERS = "Transformers"
#: What a file has in it whose tests run functions on ranks.
_RUNS_RANKS = re.compile(r"def \w+\([^)]*\branks\b|\b_shared_pool\b|\bRankPool\b")
#: What a file has in it whose models come from Transformers, directly or by modules of ``tests/support``.
_MODELS = r"\bsupport\.models\.(?:version2|huggingface)\b"
_TRANSFORMERS = re.compile(rf"transformers|\bfrom crossings\.|\btiny_families\b|\bversion2_families\b|{_MODELS}")
#: What a file has in it whose tests import Transformers themselves.
_IMPORTS_TRANSFORMERS = re.compile(
    rf"^[ \t]*(?:import transformers|from transformers)\b|importorskip\(\"transformers\"\)|{_MODELS}", re.MULTILINE
)
#: What a file has in it whose tests read all source files, which are parsed once in a process.
_READS_SOURCES = re.compile(r"\bimport_graph\b|\bfrom runner\.near\b")


class FewImports(LoadFileScheduling):  # type: ignore[misc]
    """Each file to one worker, with two exceptions.

    All files that import Transformers, which takes seconds in a worker and on each rank, go to one worker. So do those that
    parse all source files.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return shared_scope(ROOT / file) or file


@functools.cache
def shared_scope(path: Path) -> str:
    """Return the name of the files that stay with one worker together with this one; empty for a file of its own."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if _IMPORTS_TRANSFORMERS.search(text) or (_RUNS_RANKS.search(text) and _TRANSFORMERS.search(text)):
        return TRANSFORMERS
    return "sources" if _READS_SOURCES.search(text) else ""
