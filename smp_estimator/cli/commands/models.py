"""``smp-estimator models``: which language models of Transformers train under which mode."""

from __future__ import annotations

import click
from rich.markup import escape
from rich.table import Table

from smp_config import ConfigError
from smp_estimator.cli.console import console
from smp_estimator.models.outcomes import ALONE, MODES, FamilyOutcomes, Matrix, format_cell, read_matrix


@click.command()
@click.argument("family", nargs=-1)
@click.option("--transformers", "major", type=click.Choice(["4", "5"]), help="Major version; default: the newest.")
@click.option("--not-equal", is_flag=True, help="Only what does not train as in one process, with the reasons.")
def models(family: tuple[str, ...], major: str | None, not_equal: bool) -> None:
    """Show which language models of Transformers train as in one process.

    FAMILY is a part of a model type (llama, qwen) or a kind: causal, seq2seq, masked. Models were measured in tiny
    configurations: losses of 3 steps to 1e-5, gradients to 1e-4. Numbers under tp: the part of the matrices that a rank
    is spared, and the bytes of a layer divided by those of Megatron's.
    """
    matrix = read_matrix()
    found = matrix.matching(family)
    if not found:
        raise ConfigError(
            f"no family of the {len(matrix.families)} that were measured has {' or '.join(family)} in its name; give a part of "
            "config.model_type, such as llama, or nothing for all",
            code="SMP108",
        )
    major = major or max(matrix.versions)
    shown = [each for each in found if major in each.majors]
    if not_equal:
        shown = [each for each in shown if _differs(each, major)]
    out = console()
    versions = ", ".join(f"{name} {version}" for name, version in matrix.versions.get(major, {}).items())
    out.print(_table(shown, major, f"{len(shown)} of {len(matrix.families)} entries, {versions}"))
    for each in shown:
        for mode, outcome in each.majors[major].items():
            if outcome.reason:
                out.print(f"{each.model_type} ({each.kind}), {mode}: {escape(outcome.reason)}")
    is_overview = not family and not not_equal
    if is_overview:
        out.print(_summary(matrix, major))


def _differs(family: FamilyOutcomes, major: str) -> bool:
    return any(not outcome.is_equal for outcome in family.majors[major].values())


#: Explains the numbers under tensor parallelism.
_CAPTION = (
    "under tp: the part of the matrices that a rank is spared / the bytes that it sends for a layer, Megatron's being 1"
)


def _table(families: list[FamilyOutcomes], major: str, title: str) -> Table:
    table = Table(title=title, caption=_CAPTION)
    for column in ("family", "kind", *MODES):
        table.add_column(column)
    for family in families:
        of = family.majors[major]
        cells = [format_cell(of.get(mode)) for mode in MODES]
        if ALONE in of:
            cells = ["not in one process", *[""] * (len(MODES) - 1)]
        table.add_row(family.model_type, family.kind, *cells)
    return table


def _summary(matrix: Matrix, major: str) -> str:
    counts = [f"{mode} {equal} of {count}" for mode, equal, count in matrix.counts(major) if count]
    split = [f"{what}: {good} of {count}" for what, good, count in matrix.split_well(major) if count]
    return "\n".join((f"equal to one process, of those that it trains: {', '.join(counts)}", *split))
