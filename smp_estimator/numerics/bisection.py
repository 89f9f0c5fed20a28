"""Two recorded runs once more, from their last equal step: with the whole tensors of the module in which they part."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from smp_config import ConfigError
from smp_config.formats.secrets import MASK
from smp_estimator.local.bootstrap import is_foreign
from smp_estimator.numerics.comparison import Comparison, compare
from smp_estimator.numerics.script_run import launch_command, run_recorded
from smp_estimator.numerics.tensor_diff import (
    CloseupFiles,
    RunNames,
    WholeTensor,
    describe_differences,
    order_of_samples,
)
from smp_records.numerics import (
    CLOSEUP_VARIABLE,
    EVERY_VARIABLE,
    OUTPUT,
    OUTPUT_GRADIENT,
    TRIAL_VARIABLE,
    VARIABLE,
    Closeup,
    Start,
)

if TYPE_CHECKING:
    from smp_estimator.numerics.recorded_run import RecordedRun, TensorKey

#: Names the folder of a job's checkpoints.
_CHECKPOINT_VARIABLE = "SMP_CHECKPOINT_DIR"


class Saved(NamedTuple):
    """A whole checkpoint of a run."""

    step: int  # updates before it
    folder: Path


#: Gives the whole checkpoints in a folder.
Checkpoints = Callable[[Path], Sequence[Saved]]


class Suspect(NamedTuple):
    """The first tensor that differs.

    Attributes:
        ranks: ranks of ``run`` with different copies; empty if the two runs differ.
    """

    step: int
    call: int
    key: TensorKey
    allowed: float
    run: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def module(self) -> str:
        """Return the name of the module that the tensor belongs to."""
        name = self.key.name
        return name if self.key.phase in (OUTPUT, OUTPUT_GRADIENT) else name.rpartition(".")[0]


@dataclass(frozen=True)
class Bisection:
    """The plan for repeating two runs.

    Attributes:
        commands: words of the command of each run, given by the user or recorded.
        folder: for numbers, tensors and logs.
        checkpoints: the checkpoint from which each run starts; None for the start of the script.
    """

    found: Comparison
    suspect: Suspect
    commands: tuple[tuple[str, ...], tuple[str, ...]]
    folder: Path
    checkpoints: tuple[Saved, Saved] | None

    @classmethod
    def plan(
        cls, found: Comparison, commands: tuple[str, str], folder: Path, checkpoints: Checkpoints
    ) -> Bisection | None:
        """Choose the tensor to examine and the step to start from; return None if the runs are equal.

        Args:
            commands: as in a shell, one for each run, empty for the recorded one.

        Raises:
            ConfigError: the command that started a run is not known.
        """
        suspect = _suspect(found)
        if suspect is None:
            return None
        runs = found.one, found.other
        words = tuple(
            tuple(shlex.split(given)) or _recorded_command(run) for given, run in zip(commands, runs, strict=True)
        )
        saved = [_before(suspect.step, Start.of(run.heads[0]).checkpoints, checkpoints) for run in runs]
        common = sorted(saved[0].keys() & saved[1].keys())
        begin = (saved[0][common[-1]], saved[1][common[-1]]) if common else None
        return cls(found, suspect, (words[0], words[1]), folder, begin)

    @property
    def begin(self) -> int:
        """Return the number of updates before the first repeated step."""
        return 0 if self.checkpoints is None else self.checkpoints[0].step

    def run(self) -> tuple[Comparison, list[str]]:
        """Repeat both runs; return their comparison, and sentences on the suspected tensor.

        Raises:
            ConfigError: a run failed; the message has the end of its output.
        """
        repeated = [self._repeated(number, run) for number, run in enumerate((self.found.one, self.found.other))]
        again = compare(*repeated)
        second = _suspect(again)
        if second is None:
            step = self.suspect.step
            return again, [
                f"repeated up to step {step}, the runs are equal: what differed does not come again by itself. Look for what is "
                'not decided by a seed (data, time, the order of work); "deterministic": true names some of it'
            ]
        files = [CloseupFiles(self._place(number) / "tensors") for number in (0, 1)]
        if (second.step, second.key) != (self.suspect.step, self.suspect.key):
            first = "" if second.key.name == "" else f" of {second.key.name}"
            where = f"step {second.step}: {second.key.phase}{first}"
            if files[0].whole(second.key, call=second.call) is None or second.step != self.suspect.step:
                return again, [
                    f"repeated, the runs differ first elsewhere, at {where}; their numbers are in {self.folder}"
                ]
        return again, self._said(second, files)

    def _said(self, suspect: Suspect, files: Sequence[CloseupFiles]) -> list[str]:
        key = suspect.key
        runs = self.found.one, self.found.other
        title = f"{key.phase} of {key.name}" if key.name else key.phase
        if suspect.ranks:
            number = 0 if suspect.run == runs[0].name else 1
            copies = [files[number].whole(key, rank, suspect.call) for rank in suspect.ranks]
            heads = runs[number].heads, runs[number].heads
            names = RunNames(*(f"rank {rank}" for rank in suspect.ranks))
        else:
            copies = [each.whole(key, call=suspect.call) for each in files]
            heads = runs[0].heads, runs[1].heads
            names = RunNames(runs[0].name, runs[1].name)
        if copies[0] is None or copies[1] is None:
            return [f"no rank has kept {title} whole; what there is of its module is in {self.folder}"]
        one, other = copies[0], copies[1]
        order = None if suspect.ranks else order_of_samples(*files)
        note = []
        if order is not None and one.pieces and len(one.values) == len(order) == len(other.values):
            other = _reordered(other, order)
            note = ["the runs read the same samples in another order; they are laid side by side by what was read"]
        said = describe_differences(one, other, key, suspect.allowed, heads, names)
        return [f"{title}, element by element: {said[0]}", *said[1:], *note]

    def _place(self, number: int) -> Path:
        return self.folder / ("one", "other")[number]

    def _repeated(self, number: int, run: RecordedRun) -> RecordedRun:
        place = self._place(number)
        start = Start.of(run.heads[0])
        closeup = Closeup(self.suspect.step, self.suspect.module, str((place / "tensors").absolute()))
        # Variables of a job around this process would mislead the new one; only the data are the same.
        environment = {name: value for name, value in os.environ.items() if not is_foreign(name)}
        environment |= {name: value for name, value in os.environ.items() if name.startswith("SM_CHANNEL_")}
        environment |= {
            VARIABLE: str((place / "numbers").absolute()),
            EVERY_VARIABLE: "1",
            CLOSEUP_VARIABLE: closeup.to_text(),
            _CHECKPOINT_VARIABLE: str(self._checkpoint_folder(number)),
            "SM_MODEL_DIR": str((place / "model").absolute()),
            "SM_OUTPUT_DATA_DIR": str((place / "output").absolute()),
        }
        if start.trial:  # a run of verify, which was on the CPU
            environment |= {TRIAL_VARIABLE: start.trial, "CUDA_VISIBLE_DEVICES": "", "SMP_EMULATE_CUDA": "1"}
        directory = None if self.commands[number] != _recorded_command(run, check=False) else start.directory
        made = run_recorded(run.name, self.commands[number], place / "numbers", environment, directory)
        return replace(made, name=run.name)

    def _checkpoint_folder(self, number: int) -> Path:
        """Create a checkpoint folder for the repeated run, with a link to the checkpoint that it starts from."""
        folder = (self._place(number) / "checkpoints").absolute()
        folder.mkdir(parents=True)
        if self.checkpoints is not None:
            # Only a link: a checkpoint is large, and the run saves its own beside it.
            saved = self.checkpoints[number].folder.absolute()
            (folder / saved.name).symlink_to(saved, target_is_directory=True)
            (folder / "newest").write_text(saved.name, encoding="utf-8")
        return folder


def _suspect(found: Comparison) -> Suspect | None:
    drifted, first = found.first_drift, found.first
    if drifted is not None:
        run, drift = drifted
        return Suspect(drift.step, drift.call, drift.key, 0.0, run, drift.ranks)
    return None if first is None else Suspect(first.step, first.call, first.key, first.allowed)


def _recorded_command(run: RecordedRun, *, check: bool = True) -> tuple[str, ...]:
    """Return the command that starts a recorded run again on this machine.

    Raises:
        ConfigError: with ``check``, if the command is not known or the script is missing here.
    """
    start = Start.of(run.heads[0])
    if check and (not start.script or any(MASK in word for word in start.words)):
        why = "has a secret among its words, which is not written down" if start.script else "says of no script"
        raise ConfigError(
            f"{run.name} {why}, so that nobody can start it again: give its command by --command-one or --command-other, as it is "
            "typed in a shell",
            code="SMP119",
        )
    if check and not Path(start.script).is_file():
        raise ConfigError(
            f"{run.name} is of {start.script}, which this machine does not have: run this where it is, or give the command of that "
            "run by --command-one or --command-other",
            code="SMP119",
        )
    return tuple(launch_command(start.script, start.words, run.heads[0].world, start.parameters))


def _before(step: int, folder: str, checkpoints: Checkpoints) -> dict[int, Saved]:
    """Return a run's complete checkpoints up to and including a step, by step."""
    if not folder or not Path(folder).is_dir():
        return {}
    return {saved.step: saved for saved in checkpoints(Path(folder)) if 0 < saved.step <= step}


def _reordered(whole: WholeTensor, order: Sequence[int] | object) -> WholeTensor:
    return replace(whole, values=whole.values[order], pieces=[])  # type: ignore[index]  # an array of indices
