"""A script's first steps at the wanted degrees and in one process, both on this machine's CPU, compared number by number."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_config.parameters import ModelParallelParameters
from smp_config.version2.which_version import refuse_version_2
from smp_estimator.local.bootstrap import is_foreign
from smp_estimator.numerics.comparison import Comparison, compare
from smp_estimator.numerics.script_run import launch_command, run_recorded
from smp_records.numerics import EVERY_VARIABLE, TRIAL_VARIABLE, VARIABLE, Trial

if TYPE_CHECKING:
    from smp_estimator.numerics.recorded_run import RecordedRun, Total

#: A norm that no gradient reaches.
_NO_CLIPPING = 1e30
#: Random states differ between the degrees as a matter of course, so both runs have no dropout.
NO_DROPOUT = "dropout was set to 0 in both runs, since ranks of other degrees draw other numbers for it"


@dataclass(frozen=True)
class TrialJob:
    """One of the two runs.

    Attributes:
        name: of its folder of numbers.
        parameters: of the model parallel library.
    """

    name: str
    processes: int
    parameters: dict[str, Any]
    trial: Trial


@dataclass(frozen=True)
class Verification:
    """Two runs of a script that are compared.

    Attributes:
        script: and ``words``, its own command line.
        notes: differences between the runs and a job.
        timeout: seconds for each run; None for the launcher's own watch over hangs.
    """

    script: str
    words: tuple[str, ...]
    folder: Path
    wanted: TrialJob
    alone: TrialJob
    notes: tuple[str, ...]
    timeout: float | None = None

    @classmethod
    def plan(
        cls,
        script: str,
        words: tuple[str, ...],
        given: Mapping[str, Any],
        processes: int | None,
        steps: int,
        seed: int,
        folder: Path,
    ) -> Verification:
        """Choose the parameters of both runs.

        Args:
            given: ``mp_parameters``.
            processes: of the wanted degrees; None for as few as they need, with two replicas if ``ddp`` is set.
            steps: updates after which the runs end.
            folder: empty, or not there yet.

        Raises:
            ConfigError: parameters that are invalid, or do not fit the number of processes.
        """
        refuse_version_2(given, "verify with --parameters", script)
        wanted = ModelParallelParameters.from_mp_parameters(dict(given))
        least = wanted.pipeline_parallel_degree * wanted.tensor_parallel_degree
        if processes is None:
            # Both degrees divide the ranks with the same parameters.
            replicas = math.lcm(wanted.sharded_data_parallel_degree, wanted.context_parallel_degree)
            processes = least * max(replicas, 2 if wanted.ddp else 1)
        wanted.topology(processes)
        sent = wanted.to_mp_parameters()
        notes = [NO_DROPOUT]
        if wanted.sharded_data_parallel_degree > 1:
            notes.append(
                f"gradients were not clipped to sdp_gradient_clipping ({wanted.sdp_gradient_clipping:g}), which sharded data "
                "parallelism does and one process does not"
            )
            sent["sdp_gradient_clipping"] = _NO_CLIPPING
        batches = str(folder / "batches")
        trial = Trial(steps=steps, seed=seed)
        precision = {name: True for name in ("fp16", "bf16") if getattr(wanted, name)}
        return cls(
            script,
            words,
            folder,
            TrialJob("wanted", processes, sent, replace(trial, save=batches)),
            TrialJob("one-process", 1, {"microbatches": 1, **precision}, replace(trial, replay=batches)),
            tuple(notes),
        )

    @property
    def title(self) -> str:
        """Return in words what is run."""
        return f"{self.wanted.processes} process(es) at the wanted degrees, then one, {self.wanted.trial.steps} updates each"

    def run(self) -> Comparison:
        """Run both and compare them: the wanted degrees first, since the other run replays its batches.

        Raises:
            ConfigError: a run failed; the message has the end of its output.
        """
        found = [self._recorded(job) for job in (self.wanted, self.alone)]
        comparison = compare(found[1], found[0])
        comparison.notes += self.notes
        return comparison

    def _recorded(self, job: TrialJob) -> RecordedRun:
        record = self.folder / job.name
        command = launch_command(self.script, self.words, job.processes, job.parameters)
        environment = trial_environment(self.folder, job.name, record, job.trial)
        run = run_recorded(job.name, command, record, {**environment, "SMP_EMULATE_CUDA": "1"}, timeout=self.timeout)
        return replace(run, name="one process" if job is self.alone else "the wanted degrees")


def trial_environment(folder: Path, name: str, record: Path, trial: Trial) -> dict[str, str]:
    """Return the environment of a run that records every update into ``record``, without a GPU.

    Args:
        folder: of both runs. Each run has folders of its own in it, so that none finds the other's checkpoints.
    """
    inherited = {name: value for name, value in os.environ.items() if not is_foreign(name)}
    return {
        **inherited,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1"),
        "SMP_CHECKPOINT_DIR": str(folder / f"{name}-checkpoints"),
        "SM_MODEL_DIR": str(folder / f"{name}-model"),
        "SM_OUTPUT_DATA_DIR": str(folder / f"{name}-output"),
        **{name: value for name, value in os.environ.items() if name.startswith("SM_CHANNEL_")},
        VARIABLE: str(record.absolute()),
        EVERY_VARIABLE: "1",
        TRIAL_VARIABLE: trial.to_text(),
    }


def loss_of(run: RecordedRun) -> list[float]:
    """Return the mean loss of every training step that returns a loss; NaN alone if there is none."""
    found = []
    for totals in run.moments.values():
        by_phase: dict[str, list[Total]] = {}
        for key, total in totals.items():
            by_phase.setdefault(key.phase, []).append(total)
        if "gradient" in by_phase and "loss" in by_phase:
            loss = by_phase["loss"][0]
            found.append(loss.projections[0] / max(loss.elements, 1))
    return found or [math.nan]
