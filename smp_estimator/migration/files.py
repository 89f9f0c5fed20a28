"""Scripts and notebooks: every piece of code of a file, changed together, since names of one cell are used in another."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_config import ConfigError
from smp_estimator.migration.estimator_call import EstimatorCall
from smp_estimator.migration.names import (
    ESTIMATORS,
    HOMES,
    MOVED,
    ScriptNames,
    move_imports,
    moved_names,
    note_kept_names,
)
from smp_estimator.migration.source import Note, ScriptSource
from smp_estimator.migration.uses import rewrite_uses

_ESTIMATOR_NAMES = {name.rpartition(".")[2] for name in ESTIMATORS}


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
                "notebook, is read as Python: correct it, or make it a cell of text"
            ) from None
        names.read(sources[-1])
    stays = False
    # "import sagemaker" names nothing that is left, once what stands behind it has moved in every piece.
    keeps_sagemaker = sum(note_kept_names(source, names) for source in sources) > 0  # in each they are noted
    for source in sources:
        source.renamed = moved_names(source, names)
        needed: set[str] = set()
        for node in ast.walk(source.tree):
            kind = names.estimator_kind(node)
            if kind is None or not isinstance(node, ast.Call):
                continue
            made = EstimatorCall(source, node, kind, folder)
            if made.can_be_moved():
                made.rewrite()
                needed |= made.needed
            else:
                stays = True
        needed |= rewrite_uses(source, names)
        _write_imports(source, names, needed, stays=stays, keeps_sagemaker=keeps_sagemaker)
    return [source.changed() for source in sources], [source.notes for source in sources]


def _write_imports(
    source: ScriptSource, names: ScriptNames, needed: set[str], *, stays: bool, keeps_sagemaker: bool
) -> None:
    """Update the imports of one piece.

    Estimator classes are removed from them, unless a call of one is left as it is.
    """
    moved = {name[1:] for name in needed if name.startswith("=")}
    for full in moved:
        HOMES.setdefault(full.rpartition(".")[2], MOVED[full])
    wanted = {name for name in needed if not name.startswith("=")} | {full.rpartition(".")[2] for full in moved}
    gone = set() if stays else {f"{full}" for full in ESTIMATORS} | {"smp_estimator.ProcessSession"}
    if (moved or wanted) and not keeps_sagemaker:
        gone.add("sagemaker")
    move_imports(source, names, wanted, gone)


def migrate_file(path: Path) -> Migrated:
    """Read a script or a notebook, and change it in memory.

    Raises:
        ConfigError: it cannot be read, or is neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give a script (.py) or a notebook (.ipynb)") from None
    if path.suffix != ".ipynb":
        (after,), (notes,) = migrate_sources([text], path.parent)
        return Migrated((text,), (after,), (tuple(notes),), after)
    try:
        notebook: dict[str, Any] = json.loads(text)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is no notebook: it has no cells; a notebook is JSON as Jupyter writes it") from None
    before = [cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"]) for cell in cells]
    changed, noted = migrate_sources(before, path.parent)
    for cell, old, new in zip(cells, before, changed, strict=True):
        if old != new:
            cell["source"] = new if isinstance(cell["source"], str) else new.splitlines(keepends=True)
    content = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    return Migrated(tuple(before), tuple(changed), tuple(map(tuple, noted)), content)
