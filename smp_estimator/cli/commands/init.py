"""``smp-estimator init``: a first script and a first notebook from five questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from smp_config import ConfigError
from smp_estimator.first_job.answers import LOCAL, MODELS, STRATEGIES, Answers
from smp_estimator.first_job.notebook import notebook
from smp_estimator.first_job.script import script


@click.command()
@click.argument("folder", type=click.Path(file_okay=False), default=".")
@click.option("--model", type=click.Choice(list(MODELS)), help="What is trained.")
@click.option("--strategy", type=click.Choice(list(STRATEGIES)), help="How it is divided.")
@click.option("--processes", type=click.IntRange(1), help="Ranks of a host.")
@click.option("--instance-type", metavar="TYPE", help="local, or a type of the service such as ml.p4d.24xlarge.")
@click.option("--checkpoints/--no-checkpoints", default=None, help="Save as it goes, and resume by itself.")
@click.option("--yes", is_flag=True, help="Ask nothing: what is not given is as the questions propose it.")
@click.option("--force", is_flag=True, help="Replace train.py and train.ipynb.")
def init(folder: str, *, yes: bool, force: bool, **given: Any) -> None:
    """Write a first script and notebook into FOLDER, from five questions.

    A question that an option answers is not asked.
    """
    answers = _answers(given, ask=not yes)
    answers.check()
    texts = {"train.py": script(answers), "train.ipynb": notebook(answers)}
    target = Path(folder)
    there = [name for name in texts if (target / name).exists()]
    if there and not force:
        raise ConfigError(
            f"{target.absolute()} has {' and '.join(there)} already, which would be replaced: give another FOLDER, or --force",
            code="SMP108",
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (target / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"FOLDER {target.absolute()} cannot be written: {error.strerror}; give another one", code="SMP108"
        ) from None
    click.echo(f"{target / 'train.py'}: your model and your data go into make_model() and make_data()")
    click.echo(f"{target / 'train.ipynb'}: the same job from a notebook")
    if target != Path("."):
        click.echo(f"cd {target}")
    click.echo(answers.command)


def _answers(given: dict[str, Any], *, ask: bool) -> Answers:
    proposed = Answers()
    values = {name: value for name, value in given.items() if value is not None}
    if ask:
        questions: dict[str, Any] = {
            "model": lambda: _choice("What do you train?", MODELS, proposed.model),
            "strategy": lambda: _choice("How is it divided over the ranks?", STRATEGIES, proposed.strategy),
            "instance_type": lambda: click.prompt("Where (local, or a type such as ml.p4d.24xlarge)?", default=LOCAL),
            "processes": lambda: click.prompt(
                "How many ranks on a host?", default=proposed.processes, type=click.IntRange(1)
            ),
            "checkpoints": lambda: click.confirm("Save as it goes, and resume by itself?", default=True),
        }
        for name, question in questions.items():
            if name not in values:
                values[name] = question()
    return Answers(**values)


def _choice(question: str, choices: dict[str, str], proposed: str) -> str:
    click.echo(question)
    for name, meaning in choices.items():
        click.echo(f"  {name:<14}{meaning}")
    return str(
        click.prompt("", prompt_suffix="> ", default=proposed, type=click.Choice(list(choices)), show_choices=False)
    )
