"""The start of a rehearsal's processes, and the collection of their results."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import smp_config
from smp_config import ConfigError, ModelParallelParameters
from smp_config.formats.values import parse_dictionary
from smp_config.job import MPI_ENABLED
from smp_config.machine.emulation import VARIABLE as EMULATION_VARIABLE
from smp_config.machine.instances import require_usable
from smp_config.version2.which_version import refuse_version_2
from smp_estimator.rehearsal.result import RehearsalFailed, Rehearsed, gpu_memory_of
from smp_estimator.timeline.files import read_ranks
from smp_records.rate_card import RateCard
from smp_records.rehearsal import STAND_IN_SAMPLES, Failure, KindReport, Rehearsal, RehearsalRequest
from smp_records.rehearsal import input_shapes as input_shapes_of
from smp_records.timeline import FILE_SUFFIX

#: Where ranks read ``mp_parameters``, and what Transformers looks for besides to see that it is in a job of this library.
_PARAMETERS_VARIABLE = "SM_HP_MP_PARAMETERS"
_FRAMEWORK_VARIABLE, _WITH_RANKS = "SM_FRAMEWORK_PARAMS", {MPI_ENABLED: True}

#: Lines of the script's output that an error is given with, when nothing else is known.
_LAST_LINES = 12

#: Measured modules that a message names.
_SHOWN_MODULES = 4

#: Errors that follow from another stage's.
_CONSEQUENCES = ("StageError", "RankLeftError", "ConnectionLostError", "DeadlineError")


def rehearse(  # noqa: PLR0913 - most have defaults, and each is an option of the command
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    instance_type: str = "ml.p4d.24xlarge",
    instance_count: int = 1,
    processes_per_host: int | None = None,
    parameters: Mapping[str, Any] | str | None = None,
    rehearsed_steps: int = 3,
    steps: int | None = None,
    epochs: float | None = None,
    samples: int | None = None,
    gpu_memory_bytes: int | None = None,
    rates: str | os.PathLike[str] | None = None,
    measured: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    channels: Mapping[str, str | os.PathLike[str]] | None = None,
    input_shapes: Mapping[str, str] | None = None,
    other_ranks: bool = True,
    verbose: bool = False,
    timeout: float = 1800.0,
) -> Rehearsed:
    """Run a few steps of a script as one rank of each kind on a simulated cluster.

    Args:
        script: as a job runs it; nothing in it is changed.
        arguments: its own command line.
        instance_type: such as ``"ml.p4d.24xlarge"``.
        instance_count: instances.
        processes_per_host: ranks of an instance; default: its GPUs.
        parameters: ``mp_parameters``; None: the arguments of the script's ``smp.init()``.
        rehearsed_steps: after which the script is stopped; the last is reported, and the first creates lasting state.
        steps: of the whole training, for its hours and price; or
        epochs: passes through ``samples``; samples that do not fill a step are dropped in each pass.
        samples: of the data set; default: as many as the script's loader has.
        gpu_memory_bytes: of one GPU; default: the catalogue's.
        rates: file of a rate card (:class:`~smp_records.rate_card.RateCard`); default: the instance's stated rates.
        measured: the output of a job with timelines, or one rank's ``timeline-rank0.json``. The modules' times for a
            microbatch there are used here. The job must have the same model and microbatch size.
        environment: of the script.
        channels: folders by name, which the script finds as ``SM_CHANNEL_<NAME>``.
        input_shapes: by name, tensors of the batches that replace data that is not on this machine,
            ``{"input_ids": "-1,1024:int64"}``: -1 is the loader's batch size, a type may follow; numbers from 0 as names if a
            batch is a list.
        other_ranks: also rehearse two steps of the last rank of each stage. Its calls that wait for other ranks are compared
            with those of the first rank.
        verbose: show the script's output.
        timeout: seconds after which the rehearsal fails.

    Raises:
        ConfigError: settings that cannot work, a file that cannot be read, or PyTorch is not installed here.
        RehearsalFailed: the script failed, or cannot be rehearsed.
    """
    if not Path(script).is_file():
        raise ConfigError(
            f"the script {os.fspath(script)} is not a file; name the script that the job would run", code="SMP120"
        )
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "a rehearsal runs the script, which needs PyTorch; install it here: pip install torch", code="SMP120"
        )
    if rehearsed_steps < 2:
        raise ConfigError(
            f"rehearsed_steps is {rehearsed_steps}; the first step makes what stays, so give at least 2", code="SMP120"
        )
    if steps is not None and steps < 1:
        raise ConfigError(
            f"steps is {steps}; it is the number of steps of the whole training: give 1 or more, or none", code="SMP120"
        )
    _check_epochs(steps, epochs, samples)
    inputs = input_shapes_of(input_shapes or {})
    known = require_usable(instance_type)
    ranks = processes_per_host or (known.gpus if known is not None else None)
    if ranks is None:
        raise ConfigError(
            f"instance_type {instance_type!r} is not in the catalogue, so the number of its GPUs is not known; give "
            "processes_per_host",
            code="SMP120",
        )
    given = parse_dictionary(parameters, "parameters") if isinstance(parameters, str) else parameters
    kinds = 1
    if given is not None:
        refuse_version_2(given, "a rehearsal", Path(script))
        kinds = ModelParallelParameters.from_mp_parameters(dict(given)).topology(ranks * instance_count).pipeline
    card = _card(instance_type, ranks, rates, measured)
    with tempfile.TemporaryDirectory(prefix="smp-rehearsal-") as folder:
        request = RehearsalRequest(
            hosts=instance_count,
            ranks_per_host=ranks,
            kinds=kinds,
            instance_type=instance_type,
            rates=card,
            steps=rehearsed_steps,
            folder=folder,
            other_ranks=other_ranks,
            inputs=inputs,
            stand_in_samples=samples or STAND_IN_SAMPLES,
        )
        began = time.monotonic()
        _run(
            request,
            script,
            arguments,
            {**_folders(folder, channels, may_be_missing=bool(inputs)), **_environment(given, environment)},
            verbose=verbose,
            timeout=timeout,
        )
        found = [KindReport.model_validate_json(path.read_bytes()) for path in sorted(Path(folder).glob("kind-*.json"))]
    if measured is not None and card is not None and not any(kind.measured_seconds for kind in found):
        modules = ", ".join(dict.fromkeys(repr(one.path) for one in card.measured[:_SHOWN_MODULES]))
        raise ConfigError(
            f"none of the {len(card.measured)} durations in {os.fspath(measured)} is of a module that a step of the script ran "
            f"(they are of {modules}, …); record the timeline with the same model, in functions decorated with smp.step",
            code="SMP120",
        )
    rehearsal = Rehearsal(
        request=request.model_copy(update={"kinds": len(found)}),
        mp_parameters=dict(given or {}),
        kinds=sorted(found, key=lambda kind: kind.stage),
        seconds=time.monotonic() - began,
    )
    if epochs is not None:
        steps = steps_of_epochs(rehearsal, epochs, samples)
    return Rehearsed(rehearsal, gpu_memory_bytes or gpu_memory_of(instance_type), steps, epochs)


def _card(
    instance_type: str,
    ranks: int,
    rates: str | os.PathLike[str] | None,
    measured: str | os.PathLike[str] | None,
) -> RateCard | None:
    """Return the rates of computation and collectives.

    Return None if neither rates nor measurements are given: the runner then uses the instance's stated rates, if there are any.
    """
    if rates is None and measured is None:
        return None
    if rates is None:
        card = RateCard.of_instance(instance_type, processes_per_host=ranks)
    else:
        try:
            text = Path(rates).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"the rate card {os.fspath(rates)} cannot be read: {error.strerror}; write one with RateCard.to_json(), or leave "
                "it out for the rates of the instance",
                code="SMP120",
            ) from None
        card = RateCard.from_json(text, os.fspath(rates))
    if measured is None:
        return card
    place = os.fspath(measured)
    if Path(place).is_file() and place.endswith(FILE_SUFFIX):
        return card.with_measured(place)
    return card.with_timelines([rank for _, rank in read_ranks(place)], place)


def _check_epochs(steps: int | None, epochs: float | None, samples: int | None) -> None:
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"steps is {steps} and epochs is {epochs:g}; each says when the training ends: give one of the two",
            code="SMP120",
        )
    if epochs is not None and not 0 < epochs < math.inf:
        raise ConfigError(
            f"epochs is {epochs}; it counts passes through the data: give a number above 0", code="SMP120"
        )
    if samples is not None and samples < 1:
        raise ConfigError(
            f"samples is {samples}; it is the size of the data set: give 1 or more, or none", code="SMP120"
        )


def steps_of_epochs(rehearsal: Rehearsal, epochs: float, samples: int | None) -> int:
    """Return the optimizer steps of a number of epochs, by the samples of a step or by the script's own loader.

    Raises:
        ConfigError: the length of an epoch is not known, or it has no whole step.
    """
    (kind, *_) = rehearsal.kinds
    if samples is not None:
        if not kind.step_samples:
            raise ConfigError(
                f"samples is {samples:,}, but nothing says how many a step trains on: the script has no @smp.step with a tensor; "
                "give steps",
                code="SMP120",
            )
        each, said = (
            samples // kind.step_samples,
            f"{samples:,} samples are fewer than the {kind.step_samples:,} of a step",
        )
    elif kind.epoch_batches is not None and kind.step_batches:
        each = kind.epoch_batches // kind.step_batches
        said = f"the script's loader has {kind.epoch_batches:,} batches, fewer than the {kind.step_batches:,} of a step"
    else:
        raise ConfigError(
            f"epochs is {epochs:g}, but nothing says how long one is: the script reads no DataLoader of known length; give "
            "samples, of the data set, or steps",
            code="SMP120",
        )
    if each < 1:
        raise ConfigError(f"{said}, so an epoch has no whole step; lower the batch, or give more data", code="SMP120")
    return max(1, round(epochs * each))


def _folders(
    folder: str, channels: Mapping[str, str | os.PathLike[str]] | None, *, may_be_missing: bool
) -> dict[str, str]:
    """Create the folders that a job's script writes to, and return them with its channels by variable.

    The files that it writes there are not used.
    """
    found = {"SM_MODEL_DIR": "model", "SM_OUTPUT_DATA_DIR": "output", "SMP_CHECKPOINT_DIR": "checkpoints"}
    for name, place in found.items():
        found[name] = os.path.join(folder, place)
        Path(found[name]).mkdir()
    for name, path in (channels or {}).items():
        if not (may_be_missing or Path(path).exists()):
            raise ConfigError(
                f"the data of channel {name!r} is missing: {os.fspath(path)} does not exist; give a folder of this machine, or the "
                'shapes of a batch, which stand for it: input_shapes={"input_ids": "-1,1024:int64"}, --input-shape',
                code="SMP120",
            )
        found[f"SM_CHANNEL_{name.upper()}"] = str(Path(path).absolute())
    return found


def _environment(parameters: Mapping[str, Any] | None, given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment of the processes: this one's, with the packages' path and simulated GPUs."""
    container = str(Path(smp_config.__file__).parents[1])
    found = {**os.environ, "OMP_NUM_THREADS": "1", EMULATION_VARIABLE: "1", **(given or {})}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [container, found.get("PYTHONPATH", "")]))
    if parameters is not None:
        settled = ModelParallelParameters.from_mp_parameters(dict(parameters)).to_mp_parameters()
        found[_PARAMETERS_VARIABLE] = json.dumps(settled)
        found.setdefault(_FRAMEWORK_VARIABLE, json.dumps(_WITH_RANKS))
    return found


def _run(
    request: RehearsalRequest,
    script: str | os.PathLike[str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    verbose: bool,
    timeout: float,
) -> None:
    """Run the script to its last step; raises :class:`RehearsalFailed` with the first cause."""
    folder = Path(request.folder)
    asked, log = folder / "request.json", folder / "log.txt"
    asked.write_text(request.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "smp_tools.rehearsal.rank", str(asked), os.fspath(script), *arguments]
    with log.open("wb") as file:
        output = None if verbose else file
        try:
            code = subprocess.run(
                command, env=dict(environment), timeout=timeout, check=False, stdout=output, stderr=output
            ).returncode
        except subprocess.TimeoutExpired:
            raise RehearsalFailed(
                f"the rehearsal of {os.fspath(script)} did not end within {timeout:g} s; give a larger timeout, or have the script "
                "do less before its first steps"
            ) from None
    failures = [Failure.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("failed-*.json"))]
    if failures:
        failures.sort(key=lambda one: one.error.startswith(_CONSEQUENCES))
        first = failures[0]
        raise RehearsalFailed(_failure_text(first, is_piped=request.kinds > 1), tuple(failures))
    if code:
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])
        raise RehearsalFailed(
            f"the rehearsal of {os.fspath(script)} ended with exit code {code}:\n{last}".rstrip(":\n")
        )


def _failure_text(first: Failure, *, is_piped: bool) -> str:
    """Return the error message for the first cause."""
    at = f" at {first.line}" if first.line else ""
    said = first.error.partition("\n\nTraceback")[0]
    if first.is_of_all:
        return f"ranks of the job differ{at}: {said.partition(': ')[2]}"
    if first.is_last:
        return (
            f"the script fails on rank {first.rank}, the last of stage {first.stage}{at}: {said}; the first rank of the stage "
            "comes through, so look for what depends on the rank. If another rank would have sent what it lacks here, rehearse "
            "without it: --only-first-ranks, or other_ranks=False"
        )
    stages = f" on stage {first.stage} (rank {first.rank})" if is_piped or first.stage else ""
    return f"the script fails{stages}{at}: {said}"
