"""Stages set by hand: ``smp.partition(i)`` while a model is built, ``smp.set_partition(module, i)`` afterwards.

Both leave marks in the module itself, so copies of a module keep them.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator

from torch import nn

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_runtime.microbatch_state.construction_marks import mark_constructed
from smp_runtime.pipeline.partition.assignment import Assignment, check_together, list_first
from smp_runtime.pipeline.partition.module_tree import ModuleNode, ModuleTree, Trace, tree_without_tracing

logger = logging.getLogger("smp")

_BUILT_IN = "_smp_partition"
_SET_TO = "_smp_set_partition"
#: All calls of :meth:`ManualAssignment.set_partition` for a module, the newest last: the call's name, and the stage.
_CALLS = "_smp_set_partition_calls"


class ManualAssignment:
    """The stages that a script asks for.

    :meth:`set_partition` applies to the module and all modules in it, except those that have their own call. It
    takes precedence over the context that a module was built in, and over earlier calls. Modules with neither
    go to the default. In an automatic partition contexts do not count, and :meth:`pins` are the modules that
    stay on the stage that the script has chosen.

    Args:
        default: stage of modules built outside all contexts.
        automatic: whether the model is partitioned automatically.

    Attributes:
        used_contexts: whether a context was entered; with ``automatic`` the caller should warn that it did not
            count.
    """

    def __init__(self, stages: int, default: int = 0, *, automatic: bool = False) -> None:
        self.stages = stages
        self.default = default
        self.automatic = automatic
        self.used_contexts = False
        #: Class and stage by the name of the call. Names and not references, since a copy of the module may be wrapped.
        self._calls: dict[str, tuple[str, int]] = {}

    @contextlib.contextmanager
    def partition(self, stage: int) -> Iterator[None]:
        """Put modules that are constructed, copied or unpickled inside the block on ``stage``.

        The innermost context wins.

        Raises:
            SMPUserError: no such stage.
        """
        self._check(stage, "smp.partition")
        self.used_contexts = True
        with mark_constructed(_BUILT_IN, stage, copies=True):
            yield

    def set_partition(self, module: nn.Module, stage: int) -> None:
        """Put a module on a stage, with all modules in it that have no call of their own.

        Raises:
            SMPUserError: no such stage, or no module.
        """
        if not isinstance(module, nn.Module):
            raise SMPUserError(
                f"smp.set_partition got {kind_of(module)}; pass a module of the model, such as model.module.encoder",
                code="SMP305",
            )
        self._check(stage, "smp.set_partition")
        call, before = uuid.uuid4().hex, module.__dict__.get(_CALLS, ())
        self._calls[call] = type(module).__name__, stage
        module.__dict__[_SET_TO] = stage
        module.__dict__[_CALLS] = (*before, (call, stage))

    def review(self, model: nn.Module, loaded: Assignment | None = None) -> None:
        """Warn of calls of :meth:`set_partition` that have no effect.

        Called when the partition is decided, or ``loaded`` from a file.
        """
        tree = ModuleTree(model)
        marked = [(node, tree.modules[key].__dict__.get(_CALLS, ())) for key, node in tree.nodes()]
        seen = {call for _, calls in marked for call, _ in calls}
        foreign = [f"a {name} (stage {stage})" for call, (name, stage) in self._calls.items() if call not in seen]
        if foreign:
            logger.warning(
                "smp.set_partition has no effect for %s: no such module is in the model that was wrapped; call it for modules of "
                "that model, such as model.module.encoder, and after all that copies or replaces them",
                list_first(foreign),
            )
        moved = []
        for node, calls in marked:
            stages = [stage for _, stage in calls]
            if len(set(stages)) > 1:
                places = ", then ".join(f"stage {stage}" for stage in stages)
                moved.append(f"{node.path or '(model)'} ({places})")
        if moved and loaded is None:
            logger.warning(
                "smp.set_partition was called with different stages for %s; the last call counts: remove the others",
                list_first(moved),
            )
        if loaded is None:
            return
        apart = []
        for node, calls in marked:
            if not calls:
                continue
            _, stage = calls[-1]
            in_file = loaded.stage_of(node.path)
            if in_file != stage:
                apart.append(f"{node.path or '(model)'} (stage {stage}, but {in_file} in the file)")
        if apart:
            logger.warning(
                "smp.set_partition has no effect for %s: load_partition is true, so the stages are those of partition_file; set "
                "load_partition to false to place modules",
                list_first(apart),
            )

    def pins(self, model: nn.Module) -> dict[str, int]:
        """Return path and stage of the modules that :meth:`set_partition` was called for."""
        tree = ModuleTree(model)
        settings = ((tree.modules[key].__dict__.get(_SET_TO), node) for key, node in tree.nodes())
        return {node.path: stage for stage, node in settings if stage is not None}

    def resolve(self, model: nn.Module, trace: Trace | None = None) -> Assignment:
        """Return the stages of all modules as the script has set them.

        With a trace, parameters that other modules use are checked too.

        Raises:
            SMPUserError: modules that share a parameter are on different stages, or the default is missing.
        """
        tree = ModuleTree(model)
        module_of = {node.path: tree.modules[key] for key, node in tree.nodes()}
        placement: dict[str, int] = {}

        def visit(node: ModuleNode, inherited: int | None) -> None:
            marks = module_of[node.path].__dict__
            inherited = marks.get(_SET_TO, inherited)
            stage = marks.get(_BUILT_IN, self.default) if inherited is None else inherited
            self._check(stage, f"module {node.path!r}: partition")
            for path in (node.path, *node.aliases):
                placement[path] = stage
            for child in node.children:
                visit(child, inherited)

        visit(tree.root, None)
        assignment = Assignment(self.stages, placement)
        check_together(assignment, trace or tree_without_tracing(model))
        return assignment

    def _check(self, stage: int, where: str) -> None:
        # A flag is an ``int`` in Python: True would be stage 1.
        if isinstance(stage, bool) or not isinstance(stage, int):
            raise SMPUserError(f"{where} got {stage!r}, {kind_of(stage)}; pass the number of a stage", code="SMP305")
        if not 0 <= stage < self.stages:
            raise SMPUserError(
                f"{where} got {stage}, but pipeline_parallel_degree is {self.stages}, so stages are 0 to {self.stages - 1}; "
                "use one of these, or raise the degree",
                code="SMP305",
            )


def hand_on_stage(original: nn.Module, made: nn.Module) -> None:
    """Give a module that replaces another one the stage that the script has set for the original."""
    attributes = vars(original)
    stage = attributes.get(_BUILT_IN)
    if stage is not None:
        for part in made.modules():
            vars(part)[_BUILT_IN] = stage
    for key in (_SET_TO, _CALLS):
        if key in attributes:
            vars(made)[key] = attributes[key]
