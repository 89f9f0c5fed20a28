"""The timeline of a rehearsed step: the computations of one rank of each stage, in the format that a job's ranks record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smp_config import ConfigError
from smp_estimator.timeline.steps import JobTimeline
from smp_records.rehearsal import TimedBlock
from smp_records.timeline import RankTimeline, StepTimeline, StoredAction

if TYPE_CHECKING:
    from smp_estimator.rehearsal.result import Rehearsed
    from smp_records.rehearsal import KindReport

#: What a stage does before and after the pipeline's order: the update, mostly.
_AROUND = "update"


def timelines_of(found: Rehearsed) -> list[RankTimeline]:
    """Return the last step of the first rank of each stage.

    With a pipeline, it is the planned order, followed by the stage's other work. Without one, it is the rank's computation
    between its waits for collectives.

    Raises:
        ConfigError: there are no times, since the rates of the instance are not known.
    """
    rehearsal = found.rehearsal
    planned = next((kind for kind in rehearsal.kinds if kind.pipeline_blocks), None)
    if not rehearsal.has_times:
        raise ConfigError(
            f"the rehearsal has no times: the rates of {rehearsal.request.instance_type!r} are not known, or nothing was planned "
            f"in {rehearsal.kinds[0].steps} steps; name an instance of the catalogue, or rehearse more steps (--rehearsed)",
            code="SMP120",
        )
    job = f"rehearsal of {rehearsal.request.ranks} ranks"
    return [_of_kind(kind, planned, job, rehearsal.request.ranks_per_host) for kind in rehearsal.kinds]


def _of_kind(kind: KindReport, planned: KindReport | None, job: str, per_host: int) -> RankTimeline:
    if planned is None:
        blocks, ends = list(kind.blocks), kind.step_seconds
    else:
        makespan, runs = planned.pipeline_seconds or 0.0, planned.pipeline_runs
        blocks = [
            block.model_copy(update={"start": block.start + run * makespan, "stop": block.stop + run * makespan})
            for run in range(runs)
            for block in planned.pipeline_blocks.get(kind.stage, [])
        ]
        ends = runs * makespan
        around = kind.step_seconds - sum(block.stop - block.start for block in blocks)
        if around > 0:
            last = max((block.microbatch for block in blocks), default=0)
            blocks.append(TimedBlock(kind="S", microbatch=last, module=_AROUND, start=ends, stop=ends + around))
            ends += around
    names: dict[str, int] = {}
    paths: dict[str, int] = {}
    actions: list[StoredAction] = []
    for block in blocks:
        path = "" if block.module == _AROUND else block.module
        name = f"{block.kind}{block.microbatch} {block.module or _name(block)}"
        place = names.setdefault(name, len(names)), block.kind, block.microbatch, paths.setdefault(path, len(paths))
        actions.append((*place, block.start, block.stop))
    return RankTimeline(
        job=job,
        rank=kind.rank,
        stage=kind.stage,
        host=f"algo-{kind.rank // per_host + 1}",
        names=list(names),
        paths=list(paths),
        steps=[StepTimeline(number=max(kind.steps - 1, 0), start=0.0, stop=ends, actions=actions)],
    )


def _name(block: TimedBlock) -> str:
    return "step function" if block.kind == "S" else "(model)"


def job_timeline(timelines: Sequence[RankTimeline]) -> JobTimeline:
    """Combine the ranks' timelines into a job's timeline."""
    return JobTimeline.of([(one.file_name, one) for one in timelines])


def save_timeline(found: Rehearsed, folder: str | Path) -> list[Path]:
    """Write the files that ranks of a job would write, for ``smp-estimator timeline FOLDER``.

    Raises:
        ConfigError: there are no times, or the folder cannot be written to.
    """
    written = []
    for one in timelines_of(found):
        target = Path(folder, one.file_name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(one.model_dump_json(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{target} cannot be written: {error.strerror}; name a folder that can be", code="SMP120"
            ) from None
        written.append(target)
    return written


__all__ = ["job_timeline", "save_timeline", "timelines_of"]
