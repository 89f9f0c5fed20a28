"""One rank's pipeline: puts its parts together and carries messages between them."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from smp_runtime.comm.control import ControlPlane
from smp_runtime.module_state.attributes import Attributes
from smp_runtime.pipeline.execution.conductor import Conductor
from smp_runtime.pipeline.execution.failures import STEP_FUNCTION, Alarm, without_own_frames
from smp_runtime.pipeline.execution.microbatches import Microbatches
from smp_runtime.pipeline.execution.module_server import ModuleServer
from smp_runtime.pipeline.execution.plan_store import Plans
from smp_runtime.pipeline.execution.remote_calls import RemoteCaller, RemoteEntry
from smp_runtime.pipeline.execution.root_stage import RootStage
from smp_runtime.pipeline.execution.running_step import StepFrame
from smp_runtime.pipeline.execution.stage_context import Hub
from smp_runtime.pipeline.execution.step_admission import StepGate
from smp_runtime.pipeline.execution.task import Task
from smp_runtime.pipeline.execution.value_store import Values
from smp_runtime.pipeline.execution.watch import Watch
from smp_runtime.pipeline.observe.recorder import Recorder
from smp_runtime.pipeline.schedule.actions import TaskKind
from smp_runtime.pipeline.transport.messages import (
    Back,
    Begin,
    Call,
    Deliver,
    Diverged,
    Done,
    End,
    Fail,
    Record,
    Release,
    Reply,
    StepKind,
    Value,
)
from smp_runtime.pipeline.transport.packing import unpack
from smp_runtime.pipeline.transport.step_call import StepCall
from smp_runtime.pipeline.transport.transport import Transport
from smp_runtime.tensors.random_state import OtherGenerators, RandomState

logger = logging.getLogger("smp")


class Pipeline:
    """The pipeline of one rank: runs its modules for the other stages, and on the root stage the step function.

    Args:
        control: of the job; only used to connect.
        ranks: global ranks of this pipeline group; a stage is a position in it.
        device: where this rank computes.
        module: the model, on every rank; the parameters of a module only matter on its own stage.
        stage_of: stage of a module by path; that of ``""`` is the root stage.
        policy: ``"interleaved"`` or ``"simple"``.
        active: most microbatches in flight.
        replica: data parallel rank, part of the seeds.
        predicts: whether calls whose result is known in advance return without waiting for it.
        begins: called on a worker's thread with the microbatch of a task that begins there, None when it ends.
        share: gives the values of all pipelines that must run in one order, the deciding one's first; None: its own.
        delay: for tests: seconds by which received messages are held back.
        make_group: process groups for tensors of an accelerator.
        recorder: of the timeline, if there is one.
    """

    def __init__(
        self,
        control: ControlPlane,
        ranks: Sequence[int],
        device: torch.device,
        module: nn.Module,
        stage_of: Callable[[str], int],
        *,
        policy: str = "interleaved",
        active: int = 1,
        replica: int = 0,
        predicts: bool = True,
        begins: Callable[[int | None], None] = lambda microbatch: None,
        share: Callable[[Any], list[Any]] | None = None,
        delay: Callable[[], float] | None = None,
        make_group: Callable[[tuple[int, int]], Any] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.root_stage = stage_of("")
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._gate = StepGate(self._lock, self._dispatch)
        stage = self.ranks.index(control.rank)
        self._others = [other for other in range(len(self.ranks)) if other != stage]
        modules = dict(module.named_modules(remove_duplicate=True))
        self.hub = Hub(stage, device, self._lock, self._send, modules, stage_of, replica, predicts)
        self.hub.paths = {id(part): path for path, part in modules.items()}
        self._attributes = Attributes(
            (part for path, part in modules.items() if stage_of(path) == stage),
            in_task=lambda: self.conductor.current is not None,
        )
        self.conductor = Conductor(
            self._lock,
            stage,
            is_admitted=lambda task: self._microbatches.is_admitted(task),
            diverged=self._leave_order,
            failed=lambda task, error: self._alarm.raised(error, task.label),
            finished=self._task_finished,
            idle=self._hurry,
            device=device,
            attributes=self._attributes,
        )
        self._alarm = Alarm(stage, self.ranks, self.conductor, self._changed, lambda: self._gate.is_open, self._send)
        self._watch = Watch(recorder) if recorder is not None else None
        if self._watch is not None:
            self.conductor.observe = self._watch.segment_ended
        self.hub.conductor = self.conductor
        self.hub.values = Values(self._lock, stage, self.conductor, self._send)
        self.caller = RemoteCaller(self.hub)
        self.server = ModuleServer(self.hub, begins)
        self.plans = Plans(policy, active, share)
        forward_first = policy != "interleaved"
        self._microbatches = Microbatches(active, waits_for_forwards=forward_first)
        self._frame = StepFrame(
            self.hub,
            self.ranks,
            self._gate,
            self._alarm,
            self.plans,
            self._microbatches,
            self._attributes,
            self._changed,
            self._leave_order,
            active=active,
            forward_first=forward_first,
            watch=self._watch,
        )
        self._root = RootStage(
            self.hub, self._frame, self.plans, self._microbatches, self._others, begins, share, self._watch
        )
        self.transport = Transport(
            control,
            ranks,
            device=device,
            on_message=self._gate.receive,
            afterthought=self._news_for,
            on_lost=self._alarm.lost_stage,
            on_failed=self._alarm.broken,
            on_left=self._alarm.left_stage,
            delay=delay,
            make_group=make_group,
        )
        self._wire(modules)

    @property
    def stage(self) -> int:
        """This rank's position in its pipeline."""
        return self.hub.stage

    @property
    def is_root(self) -> bool:
        """Whether this rank runs the step function."""
        return self.stage == self.root_stage

    @property
    def is_in_model_backward(self) -> bool:
        """Whether the calling thread's task runs under ``model.backward``."""
        task = self.conductor.current
        return task is not None and task.in_model_backward

    @property
    def replayed(self) -> bool:
        """Whether the last step followed a planned order to its end."""
        return self._frame.begun is not None and self._frame.begun.replays and not self._frame.diverged

    # -- a step ----------------------------------------------------------------------------------------------------

    def run_step(self, kind: StepKind, microbatches: Sequence[Callable[[], Any]], call: StepCall) -> list[Any]:
        """Run one step; every rank of the pipeline calls it, with microbatches of its own that only the root runs.

        Args:
            kind: what steps have in common that take an equal course; the planned order belongs to it.
            microbatches: the step function with its arguments, one for each microbatch.
            call: how this rank's script has called the step.

        Returns:
            What each microbatch's function returned, on every rank; tensors without graph, except on the root.

        Raises:
            StageError: an error on another stage.
            SMPUserError: this rank has called another step than the root stage.
            DeadlineError: nothing happened for the timeout's length.
        """
        script_state, other_generators = RandomState.of_now(self.hub.device), OtherGenerators()
        try:
            results = self._root.run(kind, microbatches, call) if self.is_root else self._serve(call)
            self._frame.went_well()
            self.transport.prune()
        except BaseException as error:
            self._abort(error)
            raise error.with_traceback(without_own_frames(error.__traceback__))  # noqa: B904
        finally:
            with self._lock:
                self._frame.leave()
                self.server.clear()
            script_state.restore()
            # Every rank draws, so that scripts that draw the same numbers go on doing so.
            torch.empty((), dtype=torch.int64, device="cpu").random_()
            other_generators.restore()
        return results

    def _serve(self, call: StepCall) -> list[Any]:
        frame = self._frame
        frame.enter(call)
        self._gate.pass_early()
        frame.wait(lambda: frame.end is not None, "the root stage to finish the step", lambda: (self.root_stage,))
        end, tensors = cast(tuple[End, list[torch.Tensor]], frame.end)
        self.hub.switches.final = end.training
        if end.wants_record:
            self._send(self.root_stage, frame.own_record(), [])
        return unpack(end.outputs, tensors, module_of=self.hub.modules.__getitem__)

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """Around the backward pass that the script begins with ``model.backward``."""
        return self._root.backward()

    # -- tasks -----------------------------------------------------------------------------------------------------

    def _task_finished(self, task: Task) -> Callable[[], None] | None:
        """With the lock held: the code of a task has ended; returns what to send when the baton is handed on."""
        for call in task.ended:
            call()
        task.ended = []
        if task.kind is TaskKind.STEP:
            self._complete(task)
            return None
        caller = self.server.caller_of(task)
        if not task.open:
            self._complete(task)
        message = Value(tuple(task.parcel)) if task.parcel else None
        if message is None:
            if task.kind is TaskKind.BACKWARD and caller in self._gate.untold:
                self.transport.nudge(caller)
            return None
        tensors, task.parcel = list(task.parcel.values()), {}
        return functools.partial(self.transport.send, caller, self._gate.stamp(caller, message), tensors)

    def _news_for(self, stage: int) -> Any:
        """On a sender's thread: what a stage has not heard yet, if nobody has told it meanwhile."""
        with self._lock:
            return self._gate.stamp(stage, None) if stage in self._gate.untold else None

    def _complete(self, task: Task) -> None:
        """With the lock held: if a task and all that it asked for are done, say so."""
        if not task.code_done or task.open:
            return
        if task.kind is not TaskKind.STEP:
            self._gate.tell_later(self.server.caller_of(task), Done(str(task.kind), task.microbatch, task.path))
            return
        for stage in self._others:
            self._gate.tell_later(stage, Release(task.microbatch))
        self._release(task.microbatch)
        self._microbatches.finished.add(task.microbatch)
        self.conductor.poke()
        if self._microbatches.are_finished:
            self._changed.notify_all()

    def _hurry(self, stage: int | None = None) -> None:
        """With the lock held: tell a stage, or all, what they have not heard yet; the ends of microbatches wait for it."""
        for untold in self._gate.untold:
            if stage is None or untold == stage:
                self._send(untold, None, [])

    def _release(self, microbatch: int) -> None:
        self.hub.values.release(microbatch)
        self._attributes.release(microbatch)
        self.server.release(microbatch)

    # -- failure ---------------------------------------------------------------------------------------------------

    def _abort(self, error: BaseException) -> None:
        """The script's own thread leaves the step with an error."""
        self._alarm.raised(error, STEP_FUNCTION)
        with self._lock:
            self.conductor.abort()
        if not self.conductor.wait_for_end(60.0):
            logger.warning("tasks of the failed step are still running on stage %d", self.stage)

    def _leave_order(self, why: str) -> None:
        """With the lock held: go on in the order in which work arrives, and tell the others."""
        if self.conductor.order is not None:
            logger.debug("stage %d leaves the planned order: %s", self.stage, why)
            self._follow_no_order()
            for stage in self._others:
                self._send(stage, Diverged(why), [])

    def _follow_no_order(self) -> None:
        self.conductor.order = None
        self._frame.diverged = True
        self._root.open_gates()

    # -- messages --------------------------------------------------------------------------------------------------

    def _send(self, stage: int, message: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._alarm.check_left((stage,))
        self.transport.send(stage, self._gate.stamp(stage, message), tensors)

    def _dispatch(self, sender: int, message: Any, tensors: list[torch.Tensor]) -> None:
        """On a receiver's thread: a message of this step."""
        try:
            self._take(sender, message, tensors)
        except Exception as error:
            self._alarm.raised(error, f"(a message from stage {sender})")

    def _take(self, sender: int, message: Any, tensors: list[torch.Tensor]) -> None:
        hub = self.hub
        match message:
            case Begin():
                self._frame.begin(message)
            case Value(names):
                hub.values.put_all(names, tensors)
            case Call():
                self.server.accept_call(sender, message, tensors)
            case Back():
                self.server.accept_back(sender, message, tensors)
            case Deliver(name, stage):
                hub.values.deliver(name, stage)
            case Reply():
                with self._lock:
                    event = ("r", message.kind, message.microbatch, message.path)
                    hub.replies[event] = message
                    self.conductor.arrived(event)
                    self.conductor.poke()
            case Done(kind, microbatch, path):
                with self._lock:
                    if (task := hub.opened.pop((kind, microbatch, path), None)) is not None:
                        task.open -= 1
                        self._complete(task)
                        if task.kind is TaskKind.BACKWARD or not self.conductor.is_running:
                            self._hurry(None)
            case Release(microbatch):
                with self._lock:
                    self._release(microbatch)
            case End():
                with self._lock:
                    self._frame.end = (message, tensors)
                    self._changed.notify_all()
            case Record():
                with self._lock:
                    self._frame.records[sender] = message
                    self._changed.notify_all()
            case Diverged():
                with self._lock:
                    self._follow_no_order()
            case Fail():
                self._alarm.heard(message)

    # -- modules ---------------------------------------------------------------------------------------------------

    def _wire(self, modules: Mapping[str, nn.Module]) -> None:
        """Calls of modules that belong to other stages go there."""
        for path, module in modules.items():
            if self.hub.stage_of(path) != self.stage:
                module.__dict__["_call_impl"] = RemoteEntry(self.caller, path)
                module.__dict__["_compiled_call_impl"] = None

    def close(self) -> None:
        """Take the pipeline down; modules of other stages cannot be called any more."""
        self.transport.close()
        self.conductor.close()
        if self._watch is not None:
            self._watch.close()
        for module in self.hub.modules.values():
            module.__dict__.pop("_call_impl", None)
