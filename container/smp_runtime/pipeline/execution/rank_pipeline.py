"""One rank's pipeline: puts its parts together, and runs steps with them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from smp_config.schedules import DEFAULT_SCHEDULE
from smp_runtime.microbatch_state.attributes import Attributes
from smp_runtime.microbatch_state.remote_stubs import appearing_on
from smp_runtime.pipeline.execution.completion import Completion
from smp_runtime.pipeline.execution.failures import STEP_FUNCTION, Alarm, without_own_frames
from smp_runtime.pipeline.execution.messenger import Handler, Messenger
from smp_runtime.pipeline.execution.module_server import ModuleServer
from smp_runtime.pipeline.execution.plan_store import PlanStore
from smp_runtime.pipeline.execution.remote_calls import RemoteCaller, RemoteEntry
from smp_runtime.pipeline.execution.root_stage import RootStage
from smp_runtime.pipeline.execution.running_step import RunningStep
from smp_runtime.pipeline.execution.stage_context import StageContext
from smp_runtime.pipeline.execution.task_scheduler import TaskScheduler
from smp_runtime.pipeline.schedule.actions import TaskKind
from smp_runtime.pipeline.schedule.policies import POLICIES, Policy
from smp_runtime.pipeline.transport.messages import (
    AllDone,
    Ask,
    BackwardCall,
    Begin,
    Deliver,
    Diverged,
    Done,
    End,
    Fail,
    ForwardCall,
    ProgramLeft,
    Record,
    Release,
    Reply,
    StageProgress,
    StepAnnouncement,
    StepKind,
    Turn,
    ValueMessage,
)
from smp_runtime.pipeline.transport.packing import unpack
from smp_runtime.tensors import module_calls
from smp_runtime.tensors.random_state import OtherGenerators, RandomState

if TYPE_CHECKING:
    from smp_runtime.comm.control import ControlPlane
    from smp_runtime.pipeline.execution.task import Task, TaskWatch
    from smp_runtime.pipeline.transport.tensor_channels import MakeGroup
    from smp_runtime.pipeline.transport.transport import PipelineTransport

logger = logging.getLogger("smp")


@dataclass(frozen=True)
class PipelineSettings:
    """The settings of a pipeline; equal on all ranks, except for ``watch``."""

    policy: Policy = POLICIES[DEFAULT_SCHEDULE]
    active: int = 1  # most microbatches in flight
    replica: int = 0  # data parallel rank, part of the seeds
    predicts: bool = True  # whether calls return without waiting if their result is known in advance
    has_programs: bool = False  # whether planned steps get programs
    #: Called on a worker's thread with the microbatch of a task that begins there, None when it ends.
    begins: Callable[[int | None], None] = lambda microbatch: None
    #: Returns the context in which modules run forward for other stages. (The step function's own calls have it already.)
    runs_forward: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    #: Gives the values of all pipelines that must run in one order, the deciding one's first; None: its own.
    share: Callable[[Any], list[Any]] | None = None
    #: The same for pipelines with ranks that meet this one's in collectives while modules run; None if there are none.
    meet: Callable[[Any], list[Any]] | None = None
    repeatable: bool = False  # whether orders follow from the work alone, not from how long it takes
    delay: Callable[[], float] | None = None  # for tests: seconds by which received messages are held back
    make_group: MakeGroup | None = None  # makes process groups for tensors of an accelerator
    watch: TaskWatch | None = None  # of the timeline, if there is one


class Pipeline:
    """The pipeline of one rank: runs its modules for the other stages, and on the root stage the step function.

    It only puts the parts together. A call of a module of another stage goes from :class:`RemoteCaller` through
    :class:`Messenger` and its transport to the :class:`ModuleServer` there, which makes a task of it for the
    :class:`TaskScheduler`; :class:`Completion` follows the task to its end.

    Args:
        control: of the job; only used to connect.
        ranks: global ranks of this pipeline group; a stage is a position in it.
        module: the model, on every rank; the parameters of a module only matter on its own stage.
        stage_of: stage of a module by path; that of ``""`` is the root stage.
    """

    def __init__(
        self,
        control: ControlPlane,
        ranks: Sequence[int],
        device: torch.device,
        module: nn.Module,
        stage_of: Callable[[str], int],
        settings: PipelineSettings,
    ) -> None:
        stage = list(ranks).index(control.rank)
        modules = dict(module.named_modules(remove_duplicate=True))
        # One lock for the whole stage, so that no order of locks can go wrong; reentrant, since its parts call each other.
        lock = threading.RLock()
        attributes = Attributes(
            (part for path, part in modules.items() if stage_of(path) == stage),
            in_task=lambda: scheduler.current is not None,
        )
        scheduler = TaskScheduler(lock, stage, settings.policy, device, attributes, settings.watch)
        messenger = Messenger(lock, counts=settings.meet is not None)
        self.context = context = StageContext(
            ranks=list(ranks),
            stage=stage,
            device=device,
            lock=lock,
            send=messenger.send,
            release=messenger.tell_later,
            modules=modules,
            stage_of=stage_of,
            scheduler=scheduler,
            attributes=attributes,
            replica=settings.replica,
            predicts=settings.predicts,
            has_programs=settings.has_programs,
            watch=settings.watch,
        )
        self._alarm = Alarm(stage, context.ranks, scheduler, context.changed, messenger.is_open, messenger.send)
        self._messenger = messenger
        self.caller = RemoteCaller(context)
        self.server = server = ModuleServer(context, settings.begins, settings.runs_forward)
        self.plans = PlanStore(settings.policy, settings.active, settings.share, repeatable=settings.repeatable)
        self._running_step = running_step = RunningStep(
            context, messenger, self._alarm, self.plans, settings.policy, settings.active, settings.meet
        )
        self._root = RootStage(context, running_step, self.plans, settings.begins, settings.share)
        completion = Completion(context, messenger, server, running_step.microbatches, settings.begins)
        scheduler.report_to(
            is_admitted=running_step.microbatches.is_admitted,
            diverged=running_step.leave_order,
            failed=self._alarm.raised,
            finished=completion.code_ended,
            idle=messenger.tell_now,
            leaves_weights=completion.weights_left,
            pauses=self._pauses,
        )
        # Last of all, since messages may come from now on.
        messenger.connect(
            *(control, ranks, device, self._handlers(completion), self._alarm),
            delay=settings.delay,
            make_group=settings.make_group,
        )
        for path, part in modules.items():
            if stage_of(path) != stage:
                module_calls.answer(part, RemoteEntry(self.caller, path))

    def _handlers(self, completion: Completion) -> dict[type, Handler]:
        """Return the handler for each type of message."""
        context, server, running_step = self.context, self.server, self._running_step
        root = context.stage_of("")
        return {
            ForwardCall: server.accept_call,
            BackwardCall: server.accept_backward,
            Reply: lambda sender, reply, tensors: context.replied(reply),
            ValueMessage: lambda sender, value, tensors: completion.values_came(root, value, tensors),
            Deliver: lambda sender, wanted, tensors: context.values.deliver(wanted.name, wanted.stage),
            Done: lambda sender, done, tensors: completion.request_done(done),
            AllDone: lambda sender, done, tensors: completion.all_done(sender, done),
            ProgramLeft: lambda sender, left, tensors: completion.program_left(sender, left),
            Release: lambda sender, done, tensors: completion.microbatch_done(done.microbatch),
            Begin: lambda sender, begin, tensors: running_step.begin(begin),
            Diverged: lambda sender, message, tensors: running_step.left_order(),
            Ask: lambda sender, ask, tensors: running_step.asked(sender, ask),
            StageProgress: lambda sender, answer, tensors: running_step.answered(sender, answer),
            Turn: lambda sender, turn, tensors: running_step.turned(turn),
            End: lambda sender, end, tensors: running_step.ended(end, tensors),
            Record: lambda sender, record, tensors: running_step.recorded(sender, record),
            Fail: lambda sender, fail, tensors: self._alarm.heard(fail),
        }

    def _pauses(self, task: Task) -> None:
        if task.kind is TaskKind.STEP:
            self.context.root_program.pause()

    @property
    def transport(self) -> PipelineTransport:
        """Return the transport that carries messages to the other stages."""
        return self._messenger.transport

    @property
    def stage(self) -> int:
        """Return this rank's position in its pipeline."""
        return self.context.stage

    @property
    def is_root(self) -> bool:
        """Return whether this rank runs the step function."""
        return self.stage == self.context.stage_of("")

    @property
    def root_rank(self) -> int:
        """Return the global rank of the root stage, which runs the step function."""
        return self.context.ranks[self.context.stage_of("")]

    @property
    def is_in_model_backward(self) -> bool:
        """Return whether the calling thread's task runs under ``model.backward``."""
        task = self.context.scheduler.current
        return task is not None and task.in_model_backward

    @property
    def replayed(self) -> bool:
        """Return whether the last step followed a planned order to its end."""
        begun = self._running_step.begun
        return begun is not None and begun.replays and not self._running_step.diverged

    # -- a step ----------------------------------------------------------------------------------------------------

    def run_step(
        self, kind: StepKind | None, microbatches: Sequence[Callable[[], Any]], call: StepAnnouncement
    ) -> list[Any]:
        """Run one step; every rank of the pipeline calls it, with microbatches of its own that only the root runs.

        Args:
            kind: what steps have in common that take an equal course; the planned order belongs to it. None: nothing, and
                other pipelines need not take the step together with this one.
            microbatches: the step function with its arguments, one for each microbatch.
            call: how this rank's script has called the step.

        Returns:
            What each microbatch's function returned, on every rank; tensors without graph, except on the root.

        Raises:
            StageError: an error on another stage.
            SMPUserError: this rank has called another step than the root stage.
            DeadlineError: nothing happened for the timeout's length.
        """
        script_state, other_generators = RandomState.of_now(self.context.device), OtherGenerators()
        try:
            # Forward passes move their inputs to the device of a parameter, which may belong to another stage.
            with appearing_on(self.context.device):
                results = self._root.run(kind, microbatches, call) if self.is_root else self._serve(call)
            self._running_step.went_well()
            self.transport.prune()
        except BaseException as error:
            self._abort(error)
            raise error.with_traceback(without_own_frames(error.__traceback__))  # noqa: B904
        finally:
            with self.context.lock:
                self._running_step.leave()
                self.server.clear()
            script_state.restore()
            # Every rank draws, so that scripts that draw the same numbers go on doing so.
            torch.empty((), dtype=torch.int64, device="cpu").random_()
            other_generators.restore()
        return results

    def _serve(self, call: StepAnnouncement) -> list[Any]:
        context, step = self.context, self._running_step
        root = context.stage_of("")
        step.enter(call)
        self._messenger.pass_early()
        step.wait(lambda: step.end is not None, "the root stage to finish the step", lambda: (root,))
        step.check_children()
        end, tensors = cast("tuple[End, list[torch.Tensor]]", step.end)
        context.switches.final = end.training
        if end.wants_record:
            context.send(root, step.own_record(), [])
        return unpack(end.outputs, tensors, module_of=context.modules.__getitem__)

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the backward pass that the script begins with ``model.backward``."""
        return self._root.backward()

    # -- the end ---------------------------------------------------------------------------------------------------

    def _abort(self, error: BaseException) -> None:
        """Abort the step after an error on the script's own thread."""
        scheduler = self.context.scheduler
        self._alarm.raised(error, STEP_FUNCTION)
        with self.context.lock:
            scheduler.abort()
        if not scheduler.wait_for_end(60.0):
            logger.warning("tasks of the failed step are still running on stage %d", self.stage)

    def close(self) -> None:
        """Take the pipeline down; modules of other stages cannot be called any more."""
        self.transport.close()
        self.context.scheduler.close()
        if self.context.watch is not None:
            self.context.watch.close()
        for module in self.context.modules.values():
            module_calls.answer_itself(module)
