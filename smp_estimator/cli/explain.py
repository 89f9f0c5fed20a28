"""``smp-estimator explain``: the cause and the cure behind the code at the end of a message."""

from __future__ import annotations

import click

from smp_config import ConfigError
from smp_config.error_codes import FAMILIES, Code, catalogue
from smp_config.errors import suggest
from smp_estimator.cli.console import console


@click.command()
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Say what helps where a message ends in CODE, such as SMP302; without one, list all codes."""
    out = console()
    if code is None:
        for digit, family in FAMILIES.items():
            out.print(f"[bold]{family}[/bold]")
            for row in catalogue().values():
                if row.code[3] == digit:
                    out.print(f"  {row.code}  {row.title}", markup=False)
        return
    row = _found(code)
    out.print(f"[bold]{row.code}[/bold]  {row.title}")
    out.print(f"cause  {row.cause}", markup=False)
    out.print(f"cure   {row.cure}", markup=False)
    out.print(f"more   docs/{row.page}", markup=False)


def _found(code: str) -> Code:
    name = code.strip("[] ").upper()
    if name.isdigit():
        name = f"SMP{name}"
    found = catalogue().get(name)
    if found is None:
        raise ConfigError(
            f"CODE is {code!r}, which no error has{suggest(name, catalogue())}; `smp-estimator explain` alone lists the "
            f"{len(catalogue())} codes there are"
        )
    return found
