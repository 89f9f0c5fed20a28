"""``smp-estimator plan`` and ``suggest``: whether a model fits, and on which cluster."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from smp_config import ConfigError
from smp_config.formats.values import parse_dictionary
from smp_config.machine.instances import GIB
from smp_estimator.cli.console import console


class _Planning(click.Command):
    """Command that names its options in error messages instead of the Python arguments."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise ConfigError(self._in_options(str(error))).of_the_kind_of(error) from None

    def _in_options(self, message: str) -> str:
        for option in self.params:
            if not isinstance(option, click.Option) or option.name is None:
                continue
            # A name of one word, such as batch, is an ordinary word too: an argument where a message begins with it.
            pattern = rf"(?<![\w\"'-]){option.name}(?![\w\"'=])"
            if "_" not in option.name:
                pattern = rf"^{option.name}(?= is )"
            message = re.sub(pattern, option.opts[0], message)
        return message


def _job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that ``plan`` and ``suggest`` share."""
    options = [
        click.argument("model"),
        click.option("--processes", "processes_per_host", type=click.IntRange(1), help="Per host; default: its GPUs."),
        click.option(
            "--gpu-memory", "gpu_memory_bytes", type=float, metavar="GIB", help="Of one GPU; default: the catalogue's."
        ),
        click.option("--sequence", type=click.IntRange(1), help="Tokens per sample; default: the model's."),
        click.option(
            "--checkpointing", "activation_checkpointing", help="each, contiguous, group_N or selective; default: none."
        ),
        click.option("--fused-attention/--no-fused-attention", default=True, show_default=True),
        click.option("--dropout/--no-dropout", default=True, show_default=True),
        click.option(
            "--fp32-loss/--no-fp32-loss",
            default=None,
            help="The script computes the loss on fp32 logits; default: for a configuration of Transformers.",
        ),
        click.option(
            "--autocast",
            is_flag=True,
            help="The script trains fp32 parameters under torch.autocast in a half precision.",
        ),
        click.option("--engine", default="smp", show_default=True, help="smp, or fsdp2 for a job of PyTorch's FSDP2."),
        click.option("--compiled", is_flag=True, help="Each layer is compiled."),
        click.option("--compiled-loss", is_flag=True, help="The loss is compiled too; for the engine fsdp2."),
        click.option("--float8", is_flag=True, help="Matrix products of the layers are in float8; changes the time."),
        click.option("--optimizer", default="adam", show_default=True),
        click.option("--accumulation", type=click.IntRange(1), default=1, show_default=True),
        click.option("--samples", type=click.IntRange(1), help="Of the data set: how many steps an epoch has."),
        click.option("--tokens", type=click.IntRange(1), help="Of the data set, instead of samples or with them."),
        click.option("--epochs", type=click.IntRange(1), default=1, show_default=True),
        click.option("--steps", type=click.IntRange(1), help="Of the whole training, instead of epochs."),
        click.option(
            "--price",
            "prices",
            multiple=True,
            metavar="TYPE=USD",
            help="Of one instance per hour, instead of EC2's; may be repeated.",
        ),
        click.option("--utilisation", type=float, help="Part of its peak that a GPU reaches; default: 0.5."),
        click.option("--failures-per-gpu-hour", type=float, help="Default: 2e-5, those of the training of Llama 3."),
        click.option("--save-interval", type=float, help="Seconds between two checkpoints; default: the best."),
        click.option("--restart-seconds", type=float, help="From a failure to the next step; default: 600."),
        click.option(
            "--rates", type=click.Path(dir_okay=False), help="A rate card that smp-estimator calibrate wrote."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _model(text: str) -> Any:
    """Parse MODEL: a shape or configuration as a dictionary, a path, a count such as 7b or 350m, or a shape's name."""
    if text.lstrip().startswith("{"):
        return parse_dictionary(text, "MODEL")
    number = re.fullmatch(r"([\d.]+(?:e\d+)?)([mbt]?)", text.lower())
    if number is not None:
        try:
            return float(number[1]) * {"": 1.0, "m": 1e6, "b": 1e9, "t": 1e12}[number[2]]
        except ValueError:
            pass  # two points; the name of a shape, perhaps
    if text.lower() in ("nan", "inf"):
        return float(text)
    # Reported as a path only if it can be nothing else: a misspelt name is reported as a name.
    return Path(text) if Path(text).suffix == ".json" or Path(text).exists() else text


def _job(given: dict[str, Any]) -> dict[str, Any]:
    memory = given.pop("gpu_memory_bytes")
    if memory is not None and not 0 < memory < math.inf:
        raise ConfigError(
            f"--gpu-memory is {memory:g}; it is the memory of one GPU in GiB: give more than 0, or leave it out for the "
            "catalogue's",
            code="SMP108",
        )
    prices = dict(map(_price, given.pop("prices")))
    if given["utilisation"] is None:
        del given["utilisation"]
    in_bytes = None if memory is None else math.ceil(memory * GIB)
    return {**given, "model": _model(given["model"]), "gpu_memory_bytes": in_bytes, "prices": prices}


def _price(text: str) -> tuple[str, float]:
    """Parse the instance type and the price in ``ml.p4d.24xlarge=25``; raises ConfigError for anything else."""
    name, _, number = text.partition("=")
    try:
        return name.strip(), float(number)
    except ValueError:
        raise ConfigError(
            f"--price is {text!r}; it gives the price of one instance of a type in US dollars per hour: write for example "
            "--price ml.p4d.24xlarge=25",
            code="SMP108",
        ) from None


@click.command(cls=_Planning)
@_job_options
@click.option("--instance-type", "--instance", default="ml.p4d.24xlarge", show_default=True)
@click.option("--instance-count", "--count", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--parameters", default='{"ddp": true}', show_default=True, help="mp_parameters: a dictionary or its file."
)
@click.option("--batch", type=click.IntRange(1), help="The script's batch size; default: its microbatches.")
@click.option("--step-seconds", type=float, help="Of a step as it was measured; default: an estimate.")
def plan(parameters: str, as_json: bool, **given: Any) -> None:
    """Check whether MODEL fits, show how it uses memory, and suggest changes.

    MODEL is the name of a published model (gpt2-xl, meta-llama/Llama-3.1-8B, …), a number of parameters (20e9, 20b, 350m), a
    configuration of Transformers (config.json or its folder), or a shape as a dictionary or its file. Exit code 1 if it
    does not fit.
    """
    from smp_estimator import planning

    made = planning.plan(parameters=parse_dictionary(parameters, "--parameters"), **_job(given))
    _show(made, made.verdict, as_json=as_json)


@click.command(cls=_Planning)
@_job_options
@click.option(
    "--instance-type", "--instance", help="Default: the one that makes the smallest cluster, or as --prefer says."
)
@click.option("--instance-count", "--count", type=click.IntRange(1), help="Default: the fewest on which MODEL fits.")
@click.option(
    "--prefer",
    type=click.Choice(["smallest", "cheapest", "fastest"]),
    default="smallest",
    show_default=True,
    help="Of the clusters that fit: by size, by the price of a token, or by tokens per second.",
)
@click.option("--up-to", type=click.IntRange(1), help="Most instances that --prefer cheapest and fastest consider.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Samples per GPU.")
@click.option("--global-batch", type=click.IntRange(1), help="Samples per optimizer step, instead of --batch.")
@click.option("--precision", type=click.Choice(["auto", "bf16", "fp16", "fp32"]), default="auto", show_default=True)
@click.option("--parameters", help="mp_parameters as they are now: which single change of them would help most?")
@click.option(
    "--budget", type=float, help="Seconds that a search over all degrees may take; default: 20, of a script 600."
)
@click.option(
    "--script",
    type=click.Path(exists=True, dir_okay=False),
    help="Rehearse this script instead of planning MODEL; its arguments, with {batch} in them, stand behind --.",
)
@click.option("--tensor", is_flag=True, help="The script has modules that tensor parallelism distributes.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def suggest(
    as_json: bool,
    parameters: str | None,
    script: str | None,
    tensor: bool,
    budget: float | None,
    arguments: tuple[str, ...],
    **given: Any,
) -> None:
    """Pick degrees for MODEL, in the order of the best practices, and a cluster if none is given.

    MODEL: as for plan. With --instance-type alone, the smallest number of instances that fits is searched. Exit code 1 if MODEL
    does not fit on the given cluster; the output then names clusters on which it fits.

    With --script, the degrees with which the script is fastest on a cluster are searched, by rehearsing it:
    suggest --script train.py --instance-type T --instance-count N --global-batch B -- --batch-size {batch}
    """
    from smp_estimator import planning

    current = None if parameters is None else parse_dictionary(parameters, "--parameters")
    if script is not None:
        _suggest_for_script(script, (given["model"], *arguments), current, tensor, budget, given, as_json=as_json)
        return
    if arguments:
        raise ConfigError(
            f"{' '.join(arguments)} stands behind the model, and only --script has arguments of its own; leave it out, or name "
            "the script with --script",
            code="SMP108",
        )
    seconds: dict[str, Any] = {} if budget is None else {"budget": budget}
    found = planning.suggest(parameters=current, **seconds, **_job(given))
    _show(found, found.plan.verdict, as_json=as_json)


def _suggest_for_script(
    script: str,
    arguments: tuple[str, ...],
    parameters: dict[str, Any] | None,
    tensor: bool,
    budget: float | None,
    given: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    from smp_estimator.rehearsal.search import suggest_for_script

    for name, option in (
        ("instance_type", "--instance-type"),
        ("instance_count", "--instance-count"),
        ("global_batch", "--global-batch"),
    ):
        if given[name] is None:
            raise ConfigError(
                f"a script is rehearsed on one cluster with one global batch, and there is no {option}; give {option}",
                code="SMP108",
            )
    job = _job({**given, "model": "gpt2"})
    precision = {} if given["precision"] in ("auto", "fp32") else {given["precision"]: True}
    more: dict[str, Any] = {} if budget is None else {"budget": budget}
    found = suggest_for_script(
        script,
        arguments,
        instance_type=given["instance_type"],
        instance_count=given["instance_count"],
        global_batch=given["global_batch"],
        parameters={**precision, **(parameters or {})},
        processes_per_host=given["processes_per_host"],
        gpu_memory_bytes=job["gpu_memory_bytes"],
        tensor_parallelism=tensor,
        usd_per_hour=job["prices"].get(given["instance_type"]),
        tell=lambda line: click.echo(line, err=True),
        **more,
    )
    _show(found, found.verdict, as_json=as_json)


def _show(found: Any, verdict: Any, *, as_json: bool) -> None:
    from smp_estimator.planning import Verdict

    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        console().print(found)
    if verdict is Verdict.DOES_NOT_FIT:
        raise click.exceptions.Exit(1)
