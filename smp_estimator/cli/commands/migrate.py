"""``smp-estimator migrate``: a script or a notebook of SDK v2 as one of SDK v3."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape

from smp_config import ConfigError
from smp_config.machine.extras import install_command
from smp_estimator.cli.console import console

if TYPE_CHECKING:
    from smp_estimator.migration import Migrated


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--write", is_flag=True, help="Change FILE; without it the change is only shown.")
def migrate(file: str, write: bool) -> None:
    """Show, or make, the change of FILE (.py or .ipynb) from SageMaker SDK v2 to v3.

    Calls of PyTorch, HuggingFace, SMPEstimator and SMPHuggingFace become ModelTrainer, fit() becomes train(). What has no
    place there is listed with its line. Neither SDK has to be installed.
    """
    from smp_estimator.migration import migrate_file

    path = Path(file)
    made = migrate_file(path)
    out = console()
    if not made.changes:
        out.print(f"{escape(file)}: nothing to change", soft_wrap=True)
    elif write:
        try:
            path.write_text(made.content, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}; without --write the change is shown", code="SMP117"
            ) from None
        out.print(f"{escape(file)}: changed; {install_command('sagemaker3')} has what it needs", soft_wrap=True)
    else:
        click.echo(_difference(made, file), nl=False)
    for number, notes in enumerate(made.notes, 1):
        where = f"cell {number}, " if path.suffix == ".ipynb" else ""
        for note in sorted(notes, key=lambda each: each.line):
            out.print(f"[yellow]look at[/yellow] {where}line {note.line}: {escape(note.text)}", soft_wrap=True)


def _difference(made: Migrated, file: str) -> str:
    """Return the changes in the format of ``diff -u``; for a notebook, cell by cell."""
    parts = []
    for number, (before, after) in enumerate(zip(made.before, made.after, strict=True), 1):
        name = file if len(made.before) == 1 else f"{file} (cell {number} with code)"
        lines = difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"{name}", f"{name}, migrated"
        )
        parts += [line if line.endswith("\n") else f"{line}\n" for line in lines]
    return "".join(parts)
