"""The most helpful single changes of given settings, and the result of a search in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_config import ModelParallelParameters
from smp_config.schedules import TRAITS
from smp_config.version2.which_version import refuse_version_2
from smp_estimator.planning.search.branch_and_bound import Found, Search
from smp_estimator.planning.search.planned import configuration_of, plan_of, region_of, space_of
from smp_estimator.planning.step_time import unknown_because

if TYPE_CHECKING:
    from smp_estimator.planning.plan import Plan
    from smp_estimator.planning.request import Request
    from smp_estimator.planning.search.space import Configuration

#: Names of a configuration's levels in reports.
_WORDS = {
    "pipeline": "pipeline_parallel_degree",
    "tensor": "tensor_parallel_degree",
    "microbatches": "microbatches",
    "schedule": "pipeline",
    "active": "active_microbatches",
    "placement": "placement_strategy",
}
_STATES = {"whole": "no sharing of state", "optimizer": "shard_optimizer_state"}
_MEMORIES = {
    "kept": "no activation checkpointing",
    "again": "activation checkpointing",
    "offloaded": "offload_activations",
}


@dataclass(frozen=True)
class Improvement:
    """A single change, and the plan that it leads to.

    Attributes:
        what: is changed, such as ``"microbatches 4 → 16"``.
        plan: after the change.
        seconds_before: of a step; None where the settings did not fit, or their time is unknown.
    """

    what: str
    plan: Plan
    seconds_before: float | None

    @property
    def seconds(self) -> float | None:
        """Return the seconds of a step after the change; None if they are unknown."""
        return None if self.plan.time is None else self.plan.time.total

    def to_dict(self) -> dict[str, Any]:
        """Return the change, seconds and bytes by name."""
        return {
            "what": self.what,
            "parameters": self.plan.request.parameters.to_mp_parameters(),
            "batch": self.plan.request.workload.batch,
            "seconds_per_step": self.seconds,
            "seconds_before": self.seconds_before,
            "total_bytes": self.plan.total_bytes,
        }

    def __str__(self) -> str:
        return change_line(self.what, self.seconds, self.seconds_before)


def find_improvements(
    request: Request, samples: int, parameters: Mapping[str, Any], budget: float
) -> tuple[Improvement, ...]:
    """Return single changes of settings that shorten a step or let it fit, the most helpful first.

    One level of a configuration changes. Levels that depend on it (microbatches of another batch) take the
    nearest value.

    Args:
        request: of the cluster and the model.
        samples: of an optimizer step; they do not change.
        parameters: ``mp_parameters`` that are changed.
        budget: seconds after which the search ends.

    Raises:
        ConfigError: settings that cannot work, or do not read this global batch.
    """
    if unknown_because(request) is not None:
        return ()
    refuse_version_2(parameters, "a search for degrees")
    given = ModelParallelParameters.from_mp_parameters({"ddp": True, **parameters})
    if not TRAITS[given.pipeline].trains:  # the schedule decides that this job does not train
        request = request.changed({"pipeline": given.pipeline})
    start = configuration_of(request.changed(given.to_mp_parameters()))
    space_of(request, samples).check(start)
    plan_of(request, samples, start)  # raises if the settings cannot work
    search = Search([region_of(request, samples)], budget=budget)
    before = search.judge(start).evaluated
    seconds = before.seconds if before.fits else None
    found = search.changes(start)
    return tuple(
        Improvement(
            change_words(name, start, judged.configuration), plan_of(request, samples, judged.configuration), seconds
        )
        for name, judged in found
    )


def change_words(name: str, before: Configuration, after: Configuration) -> str:
    """Return a change as text, ``"microbatches 4 → 16"``, with its consequences."""
    if name == "state":
        return _state(after)
    if name == "memory":
        stops_offloading = (before.memory, after.memory) == ("offloaded", "again")
        return "no offload_activations" if stops_offloading else _MEMORIES[after.memory or "kept"]
    change = f"{_WORDS[name]} {getattr(before, name)} → {getattr(after, name)}"
    has_other_microbatches = after.microbatches != before.microbatches
    if name in ("pipeline", "tensor") and has_other_microbatches:
        # Both divide the batch, so that their change may need other microbatches.
        change += f" (microbatches {before.microbatches} → {after.microbatches})"
    return change


def _state(at: Configuration) -> str:
    return f"sharded_data_parallel_degree {at.sharded}" if at.sharded > 1 else _STATES[str(at.state)]


def change_line(what: str, after: float | None, before: float | None) -> str:
    """Return a line with a change and the seconds of a step after and before it.

    None means that the time is not known, or that the earlier settings did not fit.
    """
    seconds = "" if after is None else f"{after:.3g} s per step"
    if before is None or after is None:
        return f"{what}: fits, {seconds}".rstrip(", ")
    return f"{what}: {seconds} instead of {before:.3g} ({1 - after / before:.1%} less)"


def search_line(found: Found) -> str:
    """Return a line with the number of configurations evaluated, and whether a better one may exist."""
    looked = f"{len(found.judged)} configurations in {found.seconds:.3g} s"
    if found.is_proven:
        return f"{looked}; by their bounds no other is faster"
    return f"{looked}, when the budget ended; another may be faster by up to {found.possible_gain:.0%}"


def search_dict(found: Found) -> dict[str, Any]:
    """Return the same facts as :func:`search_line`, as numbers."""
    return {
        "evaluated": len(found.judged),
        "seconds": found.seconds,
        "is_proven": found.is_proven,
        "possible_gain": found.possible_gain,
    }


__all__ = ["Improvement", "change_line", "change_words", "find_improvements", "search_dict", "search_line"]
