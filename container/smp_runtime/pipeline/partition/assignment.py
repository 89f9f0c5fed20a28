"""The stage of each module: the result of every partition decision, and its file format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_config.errors import kind_of, suggest
from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.partition.module_tree import ModuleTree, Trace, together_with_reasons

if TYPE_CHECKING:
    from torch import nn

_FORMAT = 1


class Assignment:
    """A stage for every module of a model.

    Args:
        stages: number of stages.
        placement: stage by path; ``""`` is the root. All paths of a module that is registered several times.
        attributes: path and name of each known attribute with tensors that forward passes change: other stages
            do not see the changes.

    Raises:
        SMPUserError: a stage out of range, or no root.
    """

    def __init__(self, stages: int, placement: Mapping[str, int], attributes: Iterable[tuple[str, str]] = ()) -> None:
        for path, stage in placement.items():
            if not 0 <= stage < stages:
                raise SMPUserError(
                    f"module {path!r} is assigned to partition {stage}, but there are {stages} stages, 0 to {stages - 1}; "
                    "use one of these, or raise pipeline_parallel_degree",
                    code="SMP305",
                )
        if "" not in placement:
            raise SMPUserError(
                f"the partition has {len(placement)} modules but not the model itself, whose path is the empty string; "
                "add an entry for it",
                code="SMP305",
            )
        self.stages = stages
        self.attributes = [(path, name) for path, name in attributes]
        self._placement = dict(placement)

    def stage_of(self, path: str) -> int:
        """Return the stage of a module, by any of its paths.

        Raises:
            SMPUserError: the model has no such module.
        """
        try:
            return self._placement[path]
        except KeyError:
            near = suggest(path, self._placement)
            raise SMPUserError(
                f"the partition has no module {path!r}{near}; its paths are those of named_modules()", code="SMP305"
            ) from None

    @property
    def root_stage(self) -> int:
        """Return the stage that runs the step function."""
        return self._placement[""]

    def paths(self, stage: int) -> list[str]:
        """Return all paths of the modules of a stage, in the order of the decision."""
        return [path for path, at in self._placement.items() if at == stage]

    def __len__(self) -> int:
        return len(self._placement)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Assignment) and (self.stages, self._placement) == (other.stages, other._placement)

    def __hash__(self) -> int:
        return hash((self.stages, frozenset(self._placement.items())))

    def __repr__(self) -> str:
        counts = [len(self.paths(stage)) for stage in range(self.stages)]
        return f"Assignment({self.stages} stages with {' + '.join(map(str, counts))} modules)"

    # -- files -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain values, for JSON files and checkpoints."""
        data = {"format": _FORMAT, "stages": self.stages, "modules": dict(self._placement)}
        return {**data, "attributes": [list(each) for each in self.attributes]} if self.attributes else data

    @classmethod
    def from_dict(cls, data: Any) -> Assignment:
        """Return the decision from the result of :meth:`to_dict`.

        Raises:
            SMPUserError: ``data`` is something else.
        """
        if not isinstance(data, Mapping) or not {"stages", "modules"} <= set(data):
            has = f"the keys {sorted(map(str, data))}" if isinstance(data, Mapping) else f"{kind_of(data)}"
            raise SMPUserError(
                f'a partition is a dictionary with "stages" and "modules", but this is {has}; write it with partition_file '
                "and load_partition off",
                code="SMP305",
            )
        if data.get("format", _FORMAT) != _FORMAT:
            raise SMPUserError(
                f"the partition has format {data['format']}, and this version reads format {_FORMAT}; partition the model "
                "anew",
                code="SMP305",
            )
        stages, modules = data["stages"], data["modules"]
        whole = isinstance(modules, Mapping) and all(type(stage) is int for stage in modules.values())
        if type(stages) is not int or not whole:
            raise SMPUserError(
                'the partition has values that are no whole numbers; "stages" is a number, and "modules" has a number '
                "for every path",
                code="SMP305",
            )
        attributes = data.get("attributes", [])
        if not isinstance(attributes, list) or not all(_is_pair(each) for each in attributes):
            raise SMPUserError(
                "the partition's \"attributes\" are no list of pairs of a module's path and a name; partition the model anew",
                code="SMP305",
            )
        return cls(stages, modules, attributes)

    def save(self, file: str | Path) -> list[Path]:
        """Write the decision as JSON.

        Args:
            file: a path. In a job, a relative path is resolved in the folders that outlive the job: the output
                data, and the checkpoints if the job has them.

        Returns:
            The files that were written.

        Raises:
            SMPUserError: none of them can be written.
        """
        files = [folder / file for folder in _job_folders()] or [Path(file)]
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        written, failures = [], []
        for path in dict.fromkeys(files):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                written.append(path)
            except OSError as error:
                failures.append(f"{str(path)!r} ({error.strerror})")
        if not written:
            raise SMPUserError(
                f"partition_file cannot be written to {' or '.join(failures)}; the rank that traces the model writes it: name a "
                "file in a folder that it can write to, or leave partition_file out",
                code="SMP305",
            )
        return written

    @classmethod
    def load(cls, file: str | Path) -> Assignment:
        """Read the file that :meth:`save` wrote.

        Args:
            file: a path. In a job, a relative path is searched in the folders of :meth:`save`, the checkpoints
                first, and then in the working directory, which holds the job's code.

        Raises:
            SMPUserError: there is no such file, or its contents are not a partition.
        """
        places = list(dict.fromkeys([*(folder / file for folder in _job_folders()), Path(file)]))
        found = next((path for path in places if path.exists()), places[-1])
        try:
            data = json.loads(found.read_text())
        except OSError as error:
            looked = f"; looked for in {', '.join(str(path.parent) for path in places)}" if len(places) > 1 else ""
            raise SMPUserError(
                f"partition_file {str(file)!r} cannot be read ({error.strerror}{looked}); load_partition needs a file that a job "
                "with the same model wrote: give its path, a checkpoint_s3_uri that both jobs have, or set load_partition to false",
                code="SMP305",
            ) from None
        except ValueError as error:
            raise SMPUserError(
                f"partition_file {str(file)!r} is no JSON: {error}; partition the model anew", code="SMP305"
            ) from None
        return cls.from_dict(data)

    # -- whether it fits -------------------------------------------------------------------------------------------

    def check(self, model: nn.Module, stages: int) -> None:
        """Check that this decision can be used for a model.

        Raises:
            SMPUserError: it is for another number of stages or another model, or it separates modules that share a
                parameter.
        """
        if self.stages != stages:
            raise SMPUserError(
                f"the partition is for {self.stages} stages, but pipeline_parallel_degree is {stages}; set it to "
                f"{self.stages}, or let the model be partitioned anew",
                code="SMP305",
            )
        tree = ModuleTree(model)
        known = [path for node in tree.root.walk() for path in (node.path, *node.aliases)]
        missing = [path for path in known if path not in self._placement]
        unknown = sorted(set(self._placement) - set(known))
        if missing or unknown:
            lacks = [f"lacks {list_first(map(repr, missing))}"] if missing else []
            has = [f"has {list_first(map(repr, unknown))}, which the model has not"] if unknown else []
            raise SMPUserError(
                f"the partition does not belong to this model of {len(known)} modules: it {' and '.join(lacks + has)}; "
                "load the partition of this model, or let it be partitioned anew",
                code="SMP305",
            )
        for node in tree.root.walk():
            for alias in node.aliases:
                if self._placement[alias] != self._placement[node.path]:
                    raise SMPUserError(
                        f"{node.path!r} and {alias!r} are one module, but the partition has them on stages "
                        f"{self._placement[node.path]} and {self._placement[alias]}; set both to "
                        f"{self._placement[node.path]}",
                        code="SMP305",
                    )
        check_together(self, Trace(tree.root))


def idle_stages(stages: Sequence[int]) -> str:
    """Return ``stage 0 has nothing to do`` for one stage, or the same for several."""
    if len(stages) == 1:
        return f"stage {stages[0]} has nothing to do"
    return f"stages {', '.join(map(str, stages))} have nothing to do"


def _job_folders() -> list[Path]:
    """Return the folders that outlive a job: its checkpoints, if it has them, and its output data."""
    folders = []
    checkpoints = os.environ.get("SMP_CHECKPOINT_DIR")
    if checkpoints and Path(checkpoints).is_dir():
        folders.append(Path(checkpoints))
    output = os.environ.get("SM_OUTPUT_DATA_DIR")
    if output:
        folders.append(Path(output))
    return folders


def check_together(assignment: Assignment, trace: Trace) -> None:
    """Check that modules which hold or use the same parameter, buffer or attribute are on one stage.

    Raises:
        SMPUserError: with both modules and their stages.
    """
    for paths, reason in together_with_reasons(trace):
        first = paths[0]
        for path in paths[1:]:
            one, other = assignment.stage_of(first), assignment.stage_of(path)
            if one != other:
                way_out = "" if reason.startswith("parameter ") else ", or return the value from forward"
                raise SMPUserError(
                    f"{_called(first)} on stage {one} and {_called(path)} on stage {other} hold or use the same {reason}, so "
                    f"they must be on one stage; set {_called(path)} to partition {one}, or {_called(first)} to "
                    f"{other}{way_out}",
                    code="SMP305",
                )


def _is_pair(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(isinstance(each, str) for each in value)


def _called(path: str) -> str:
    return f"module {path!r}" if path else "the model itself"


def list_first(items: Iterable[str]) -> str:
    """Return the first three items as text, and the number of the others."""
    found = list(items)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
