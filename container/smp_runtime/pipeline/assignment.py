"""Which stage has which module: the result of every partition decision, and its form in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from smp_config.errors import suggest
from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.tree import ModuleTree, Trace, together_with_reasons

_FORMAT = 1


class Assignment:
    """A stage for every module of a model.

    Args:
        stages: number of stages.
        placement: stage by path; ``""`` is the root. All paths of a module that is registered several times.

    Raises:
        SMPUserError: a stage out of range, or no root.
    """

    def __init__(self, stages: int, placement: Mapping[str, int]) -> None:
        for path, stage in placement.items():
            if not 0 <= stage < stages:
                raise SMPUserError(
                    f"module {path!r} is assigned to partition {stage}, but there are {stages} stages, 0 to {stages - 1}; "
                    "use one of these, or raise pipeline_parallel_degree"
                )
        if "" not in placement:
            raise SMPUserError(
                f"the partition has {len(placement)} modules but not the model itself, whose path is the empty string; "
                "add an entry for it"
            )
        self.stages = stages
        self._placement = dict(placement)

    def stage_of(self, path: str) -> int:
        """The stage of a module, by any of its paths.

        Raises:
            SMPUserError: the model has no such module.
        """
        try:
            return self._placement[path]
        except KeyError:
            near = suggest(path, self._placement)
            raise SMPUserError(
                f"the partition has no module {path!r}{near}; its paths are those of named_modules()"
            ) from None

    @property
    def root_stage(self) -> int:
        """The stage that runs the step function."""
        return self._placement[""]

    def paths(self, stage: int) -> list[str]:
        """All paths of the modules of a stage, in the order of the decision."""
        return [path for path, at in self._placement.items() if at == stage]

    def __len__(self) -> int:
        return len(self._placement)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Assignment) and self.stages == other.stages
        return same and isinstance(other, Assignment) and self._placement == other._placement

    def __hash__(self) -> int:
        return hash((self.stages, frozenset(self._placement.items())))

    def __repr__(self) -> str:
        counts = [len(self.paths(stage)) for stage in range(self.stages)]
        return f"Assignment({self.stages} stages with {' + '.join(map(str, counts))} modules)"

    # -- files -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain values, for JSON files and checkpoints."""
        return {"format": _FORMAT, "stages": self.stages, "modules": dict(self._placement)}

    @classmethod
    def from_dict(cls, data: Any) -> Assignment:
        """The decision from :meth:`to_dict`.

        Raises:
            SMPUserError: something else.
        """
        if not isinstance(data, Mapping) or not {"stages", "modules"} <= set(data):
            has = f"the keys {sorted(map(str, data))}" if isinstance(data, Mapping) else f"a {type(data).__name__}"
            raise SMPUserError(
                f'a partition is a dictionary with "stages" and "modules", but this is {has}; write it with partition_file '
                "and load_partition off"
            )
        if data.get("format", _FORMAT) != _FORMAT:
            raise SMPUserError(
                f"the partition has format {data['format']}, and this version reads format {_FORMAT}; partition the model "
                "anew"
            )
        stages, modules = data["stages"], data["modules"]
        whole = isinstance(modules, Mapping) and all(type(stage) is int for stage in modules.values())
        if type(stages) is not int or not whole:
            raise SMPUserError(
                'the partition has values that are no whole numbers; "stages" is a number, and "modules" has a number '
                "for every path"
            )
        return cls(stages, modules)

    def save(self, file: str | Path) -> None:
        """Write the decision as JSON."""
        Path(file).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, file: str | Path) -> Assignment:
        """Read what :meth:`save` wrote.

        Raises:
            SMPUserError: there is no such file, or it holds something else.
        """
        try:
            data = json.loads(Path(file).read_text())
        except OSError as error:
            raise SMPUserError(
                f"partition_file {str(file)!r} cannot be read ({error.strerror}); load_partition needs a file that a job "
                "with the same model wrote: give its path, or set load_partition to false"
            ) from None
        except ValueError as error:
            raise SMPUserError(f"partition_file {str(file)!r} is no JSON: {error}; partition the model anew") from None
        return cls.from_dict(data)

    # -- whether it fits -------------------------------------------------------------------------------------------

    def check(self, model: nn.Module, stages: int) -> None:
        """Make sure that this decision can be used for a model.

        Raises:
            SMPUserError: it is for another number of stages or another model, or it sets modules apart that share a
                parameter.
        """
        if self.stages != stages:
            raise SMPUserError(
                f"the partition is for {self.stages} stages, but pipeline_parallel_degree is {stages}; set it to "
                f"{self.stages}, or let the model be partitioned anew"
            )
        tree = ModuleTree(model)
        known = [path for node in tree.root.walk() for path in (node.path, *node.aliases)]
        missing = [path for path in known if path not in self._placement]
        unknown = sorted(set(self._placement) - set(known))
        if missing or unknown:
            lacks = [f"lacks {_some(missing)}"] if missing else []
            has = [f"has {_some(unknown)}, which the model has not"] if unknown else []
            raise SMPUserError(
                f"the partition does not belong to this model of {len(known)} modules: it {' and '.join(lacks + has)}; "
                "load the partition of this model, or let it be partitioned anew"
            )
        for node in tree.root.walk():
            for alias in node.aliases:
                if self._placement[alias] != self._placement[node.path]:
                    raise SMPUserError(
                        f"{node.path!r} and {alias!r} are one module, but the partition has them on stages "
                        f"{self._placement[node.path]} and {self._placement[alias]}; set both to "
                        f"{self._placement[node.path]}"
                    )
        check_together(self, Trace(tree.root))


def check_together(assignment: Assignment, trace: Trace) -> None:
    """Make sure that modules which hold or use the same parameter are on one stage.

    Raises:
        SMPUserError: with both modules and their stages.
    """
    for paths, parameter in together_with_reasons(trace):
        first = paths[0]
        for path in paths[1:]:
            one, other = assignment.stage_of(first), assignment.stage_of(path)
            if one != other:
                raise SMPUserError(
                    f"{_called(first)} on stage {one} and {_called(path)} on stage {other} hold or use the same parameter "
                    f"{parameter}, so they must be on one stage; set {_called(path)} to partition {one}, or "
                    f"{_called(first)} to {other}"
                )


def _called(path: str) -> str:
    return f"module {path!r}" if path else "the model itself"


def _some(paths: list[str]) -> str:
    shown = ", ".join(repr(path) for path in paths[:3])
    return shown + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
