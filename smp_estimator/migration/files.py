"""Scripts and notebooks: every piece of code of a file, changed together, since names of one cell are used in another."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_config import ConfigError
from smp_estimator.migration.estimator_call import EstimatorCall
from smp_estimator.migration.magics import installs_version_2
from smp_estimator.migration.names import (
    ESTIMATORS,
    HOMES,
    MOVED,
    ScriptNames,
    hidden_arguments,
    kept_names,
    move_imports,
    moved_names,
    rename_classes,
)
from smp_estimator.migration.source import Note, ScriptSource
from smp_estimator.migration.uses import rewrite_uses


@dataclass(frozen=True)
class Migrated:
    """A file, or several pieces of code, changed.

    Attributes:
        before: each original piece of code; of a notebook, its cells with code.
        after: the same pieces, changed.
        notes: by piece, notes for a person to review.
        content: the whole file, changed.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    notes: tuple[tuple[Note, ...], ...]
    content: str

    @property
    def changes(self) -> bool:
        """Return whether the migration changes anything."""
        return self.before != self.after


def migrate_sources(texts: list[str], folder: Path) -> tuple[list[str], list[list[Note]]]:
    """Change pieces of code that share their names, such as the cells of a notebook.

    Args:
        folder: the folder that relative paths in the code start from.

    Returns:
        The changed pieces, and for each the notes for a person to review.

    Raises:
        ConfigError: a piece that is not Python.
    """
    names = ScriptNames()
    sources = []
    for number, text in enumerate(texts, 1):
        try:
            sources.append(ScriptSource(text))
        except SyntaxError as error:
            raise ConfigError(
                f"piece {number} of {len(texts)} is not Python: {error.msg}, line {error.lineno}; a script, or each cell of a "
                "notebook, is read as Python: correct it, or make it a cell of text",
                code="SMP117",
            ) from None
    names.read(sources)
    # "import sagemaker" names nothing that is left, once what stands behind it has moved in every piece.
    kept: set[str] = set()
    needed_by = []
    for source in sources:
        source.renamed = moved_names(source, names)
        kept |= kept_names(source, names)
        classes, needed = rename_classes(source, names)
        kept |= classes
        needed_by.append(needed)
    for source, needed in zip(sources, needed_by, strict=True):
        needed |= _rewrite_calls(source, names, folder)
        needed |= rewrite_uses(source, names)
        for line, text in source.magics.items():
            if installs_version_2(text):
                source.note_line(
                    line, "this installs version 2 of the SDK: install 'smp-estimator[sagemaker3]' instead"
                )
    gone = {*ESTIMATORS, "smp_estimator.ProcessSession"} - kept
    if any(needed_by):
        gone.add("sagemaker")
    for source, needed in zip(sources, needed_by, strict=True):
        _write_imports(source, names, needed, gone - kept, kept)
    return [source.changed() for source in sources], [source.notes for source in sources]


def _rewrite_calls(source: ScriptSource, names: ScriptNames, folder: Path) -> set[str]:
    """Change the calls that create estimators; return the names that the new calls need."""
    needed: set[str] = set()
    for node in ast.walk(source.tree):
        kind = names.estimator_kind(node)
        if kind is None or not isinstance(node, ast.Call):
            continue
        hidden = hidden_arguments(node)
        if hidden is None:
            made = EstimatorCall(source, node, kind, folder, names)
            made.rewrite()
            needed |= made.needed
            continue
        source.note(
            node,
            f"this call is left as it is: its arguments come from {source.segment(hidden)}, which only a run knows; write them "
            "out in the call, and migrate again",
        )
    return needed


def _write_imports(source: ScriptSource, names: ScriptNames, needed: set[str], gone: set[str], kept: set[str]) -> None:
    """Update the imports of one piece.

    Args:
        needed: names that the new code uses; ``=`` before the full name of SDK v2 if SDK v3 has it elsewhere.
        gone: full names that no piece uses any more.
        kept: full names that any piece still uses.
    """
    wanted: set[str] = set()
    for name in needed:
        if not name.startswith("="):
            wanted.add(name)
            continue
        full = name[1:]
        short = full.rpartition(".")[2]
        HOMES.setdefault(short, MOVED[full])
        wanted.add(short)
    for name in sorted(wanted):
        _note_taken(source, names, name)
    move_imports(source, names, wanted, gone, kept)


def _note_taken(source: ScriptSource, names: ScriptNames, name: str) -> None:
    """Note a name that the new code needs and that the script has imported from elsewhere."""
    full = names.bound.get(name, f"{HOMES[name]}.{name}")
    if full != f"{HOMES[name]}.{name}" and MOVED.get(full) != HOMES[name] and source.tree.body:
        source.note(
            source.tree.body[0],
            f"{name} is {full} here and {HOMES[name]}.{name} in the changed code: rename one of them",
        )


def migrate_file(path: Path) -> Migrated:
    """Read a script or a notebook, and change it in memory.

    Raises:
        ConfigError: it cannot be read, or is neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; give a script (.py) or a notebook (.ipynb)", code="SMP117"
        ) from None
    if path.suffix != ".ipynb":
        (after,), (notes,) = migrate_sources([text], path.parent)
        return Migrated((text,), (after,), (tuple(notes),), after)
    try:
        notebook: dict[str, Any] = json.loads(text)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path} is no notebook: it has no cells; a notebook is JSON as Jupyter writes it", code="SMP117"
        ) from None
    before = [cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"]) for cell in cells]
    changed, noted = migrate_sources(before, path.parent)
    for cell, old, new in zip(cells, before, changed, strict=True):
        if old != new:
            cell["source"] = new if isinstance(cell["source"], str) else new.splitlines(keepends=True)
    content = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    return Migrated(tuple(before), tuple(changed), tuple(map(tuple, noted)), content)
