"""A plain PyTorch script, with DDP, FSDP2 or neither, as several ranks and as one process, both on this machine's CPU."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from smp_config import ConfigError
from smp_config.errors import suggest
from smp_estimator.numerics.comparison import Comparison, compare
from smp_estimator.numerics.plain_causes import explain
from smp_estimator.numerics.recorded_run import RecordedRun
from smp_estimator.numerics.script_run import launch_command, run_recorded
from smp_estimator.numerics.verification import NO_DROPOUT, trial_environment
from smp_records.numerics import Trial
from smp_records.plain_job import NO_FUNCTION, read_facts

#: Runs a script with hooks; a file, since a rank of ``smp_launch run`` is one.
_RUNNER = "smp_tools.numerics.plain"
#: Folders of the two runs.
RANKS, ALONE = "ranks", "one-process"


@dataclass(frozen=True)
class PlainVerification:
    """Two runs of a plain script that are compared.

    Attributes:
        script: and ``words``, its own command line.
        processes: ranks of the first run; the second one has one.
        steps: updates that are recorded.
        seed: of rank 0; the other ranks have the next ones.
        folder: empty, or not there yet.
        timeout: seconds for each run.
        batches: name of the script's function that returns batches, or ``module:function``; empty if it has a ``DataLoader``.
    """

    script: str
    words: tuple[str, ...]
    processes: int
    steps: int
    seed: int
    folder: Path
    timeout: float
    batches: str = ""

    @property
    def title(self) -> str:
        """Return in words what is run."""
        return f"{self.processes} ranks, then one process, {self.steps} updates each"

    def run(self) -> Comparison:
        """Run both and compare them: the ranks first, since the one process takes their batches.

        Raises:
            ConfigError: a run failed, or it made no update from a ``DataLoader``.
        """
        self._check_function()
        batches = str((self.folder / "batches").absolute())
        trial = Trial(self.steps, self.seed)
        self._record(RANKS, self.processes, replace(trial, save=batches))
        self._record(ALONE, 1, replace(trial, replay=batches))
        return compare_plain(self.folder)

    def _check_function(self) -> None:
        if not self.batches or ":" in self.batches:
            return
        tree = ast.parse(Path(self.script).read_bytes(), self.script)
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        if self.batches not in names:
            raise ConfigError(
                f"{self.script} defines no function {self.batches!r}{suggest(self.batches, names)}; --batches is the name of the "
                "script's function that returns the next batch, or module:function if another file has it",
                code="SMP119",
            )

    def _record(self, name: str, processes: int, trial: Trial) -> None:
        record = self.folder / name
        spec = find_spec(_RUNNER)
        if spec is None or spec.origin is None:
            raise ConfigError(f"the package {_RUNNER} is not installed; install smp-estimator again", code="SMP119")
        runner = str(Path(spec.origin).with_name("run.py"))
        command = launch_command(
            runner, [self.batches or NO_FUNCTION, str(Path(self.script).absolute()), *self.words], processes, None
        )
        environment = trial_environment(self.folder.absolute(), name, record, trial)
        environment["TORCHDYNAMO_DISABLE"] = "1"  # compiled code would pass by the hooks of modules
        run = run_recorded(name, command, record, environment, timeout=self.timeout)
        if not run.moments:
            raise ConfigError(
                f"the run {name!r} has recorded nothing: no optimizer of torch.optim has made an update of a model that the script "
                f"calls; {record}.log has its output",
                code="SMP119",
            )
        if not any(any(loader.epochs) for loader in read_facts(record)[0].loaders):
            raise ConfigError(
                f"the run {name!r} has read no batch from a torch.utils.data.DataLoader, so that one process cannot be given the "
                "same ones: let the script read its batches from one, or name its function that returns them: --batches get_batch",
                code="SMP119",
            )


def compare_plain(folder: Path) -> Comparison:
    """Compare the records of both runs in a folder.

    Raises:
        ConfigError: there are none, or damaged ones.
    """
    one, ranks = (RecordedRun.read(str(folder / name)) for name in (ALONE, RANKS))
    found = compare(replace(one, name="one process"), replace(ranks, name="the ranks"))
    found.notes.append(NO_DROPOUT)
    explain(found, read_facts(folder / RANKS), read_facts(folder / ALONE)[0])
    return found
