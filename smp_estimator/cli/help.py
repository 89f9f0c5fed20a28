"""Help on the command line: explanations of the codes in messages, and completion scripts for shells."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from smp_config import ConfigError
from smp_config.error_codes import FAMILIES, Code, catalogue
from smp_config.errors import suggest
from smp_estimator.cli.console import console

#: The command's name.
PROGRAM = "smp-estimator"

#: By shell, the line of its start-up file that reads what the command prints.
LINES = {
    "bash": f'eval "$({PROGRAM} completion bash)"  # in ~/.bashrc',
    "zsh": f'eval "$({PROGRAM} completion zsh)"  # in ~/.zshrc',
    "fish": f"{PROGRAM} completion fish | source  # in ~/.config/fish/config.fish",
}


@click.command()
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Explain the CODE at the end of a message, such as SMP302. Without CODE, list all codes."""
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
            f"{len(catalogue())} codes there are",
            code="SMP108",
        )
    return found


@click.command(epilog=" · ".join(LINES.values()))
@click.argument("shell", type=click.Choice(list(LINES)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete commands and options."""
    kind = get_completion_class(shell)
    if kind is None:
        raise AssertionError(f"click completes {', '.join(LINES)}")
    root = context.find_root().command
    # The variable is click's, which looks for it when the program starts.
    click.echo(kind(root, {}, PROGRAM, f"_{PROGRAM.replace('-', '_')}_COMPLETE".upper()).source())
