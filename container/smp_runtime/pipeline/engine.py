"""One rank's pipeline: carries messages between caller, server and values, and frames them into steps."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from smp_runtime.comm.control import ControlPlane, timeout_seconds
from smp_runtime.errors import DeadlineError
from smp_runtime.pipeline.failures import STEP_FUNCTION, Alarm
from smp_runtime.pipeline.gate import StepGate
from smp_runtime.pipeline.handles import Handle
from smp_runtime.pipeline.hub import Hub, current_modes, in_modes
from smp_runtime.pipeline.microbatches import Microbatches
from smp_runtime.pipeline.plans import Plans
from smp_runtime.pipeline.protocol import (
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
from smp_runtime.pipeline.random_state import RandomState
from smp_runtime.pipeline.remote import RemoteCaller, RemoteEntry
from smp_runtime.pipeline.schedules import TaskKind
from smp_runtime.pipeline.server import ModuleServer
from smp_runtime.pipeline.tasks import Conductor, Task
from smp_runtime.pipeline.timeline import Recorder
from smp_runtime.pipeline.transport import Transport
from smp_runtime.pipeline.values import Values
from smp_runtime.pipeline.wire import pack, unpack

logger = logging.getLogger("smp")

#: Most seconds without progress, though a task could run, before a replayed order is given up.
STALL_SECONDS = 10.0


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
        self.active = active
        self._forward_first = waits_for_forwards = policy != "interleaved"
        self._share = share
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._gate = StepGate(self._lock, self._dispatch)
        self._begins = begins
        stage = self.ranks.index(control.rank)
        self._others = [other for other in range(len(self.ranks)) if other != stage]
        modules = dict(module.named_modules(remove_duplicate=True))
        self.hub = Hub(stage, device, self._lock, self._send, modules, stage_of, replica, predicts)
        self.hub.paths = {id(part): path for path, part in modules.items()}
        self.conductor = Conductor(
            self._lock,
            stage,
            is_admitted=lambda task: self._microbatches.is_admitted(task),
            diverged=self._leave_order,
            failed=lambda task, error: self._alarm.raised(error, task.label),
            finished=self._task_finished,
            idle=self._hurry,
            device=device,
        )
        self._alarm = Alarm(stage, self.ranks, self.conductor, self._changed, lambda: self._gate.is_open, self._send)
        self._recorder = recorder
        if recorder is not None:
            self.conductor.observe = self._observe
        self.hub.conductor = self.conductor
        self.hub.values = Values(self._lock, stage, self.conductor, self._send)
        self.caller = RemoteCaller(self.hub)
        self.server = ModuleServer(self.hub, self._begins)
        self.plans = Plans(policy, active, share)
        self._microbatches = Microbatches(active, waits_for_forwards)
        #: Seconds of the longest step so far that needed no order or kept to it.
        self._longest_step = 0.0
        self._begin: Begin | None = None
        self._end: tuple[End, list[torch.Tensor]] | None = None
        self._records: dict[int, Record] = {}
        self._buffers: list[tuple[int, int]] = []
        self._diverged = False
        self.transport = Transport(
            control,
            ranks,
            device=device,
            on_message=self._gate.receive,
            on_lost=self._alarm.lost_stage,
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

    # -- a step ----------------------------------------------------------------------------------------------------

    def run_step(self, kind: StepKind, microbatches: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one step; every rank of the pipeline calls it, with microbatches of its own that only the root runs.

        Args:
            kind: what steps have in common that take an equal course; the planned order belongs to it.
            microbatches: the step function with its arguments, one for each microbatch.

        Returns:
            What each microbatch's function returned, on every rank; tensors without graph, except on the root.

        Raises:
            StageError: an error on another stage.
            DeadlineError: nothing happened for the timeout's length.
        """
        script_state = RandomState.of_now(self.hub.device)
        began = time.perf_counter()
        try:
            results = self._run_root(kind, microbatches) if self.is_root else self._serve()
            if not self._diverged:
                self._longest_step = max(self._longest_step, time.perf_counter() - began)
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            self._close_step()
            script_state.restore()
            # Every rank draws, so that scripts that draw the same numbers go on doing so.
            torch.empty((), dtype=torch.int64).random_()
        return results

    def _run_root(self, kind: StepKind, microbatches: Sequence[Callable[[], Any]]) -> list[Any]:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        plan = self.plans.of(kind)
        modes = current_modes()
        self._enter_step()
        begin = Begin(seed, kind, plan.replays, None, plan.is_recorded)
        self._begin_step(begin._replace(order=plan.order_of(self.stage)))
        with self._lock:
            for number, function in enumerate(microbatches):
                task = Task(
                    TaskKind.STEP,
                    number,
                    (),
                    STEP_FUNCTION,
                    functools.partial(self._step_task, function=function, modes=modes),
                    self.hub.random_state(number, "", 0),
                    contextvars.copy_context(),
                )
                self._microbatches.tasks[number] = task
            for task in self._microbatches.tasks.values():
                self.conductor.add(task, (), self.hub.is_there)
            self.conductor.poke()
        # The others hear of the step while the first microbatch is under way; what it sends them waits for this.
        for stage in self._others:
            self._send(stage, begin._replace(order=plan.order_of(stage)), [])
        self._wait(lambda: self._microbatches.are_finished, "the microbatches to finish")
        results = [self._microbatches.results[number] for number in range(len(microbatches))]
        packed = pack(results, modules=self.hub.paths)
        diverged = self._diverged if self._share is None else any(self._share(self._diverged))
        wants = self.plans.wants_record(kind, diverged)
        for stage in self._others:
            self._send(stage, End(packed.head, wants), [tensor.detach() for tensor in packed.tensors])
        if wants:
            self._wait(lambda: len(self._records) == len(self._others), "the other stages' records")
            records = [self._own_record(), *self._records.values()]
            self.plans.learn(kind, records)
        return results

    def _serve(self) -> list[Any]:
        self._enter_step()
        self._gate.pass_early()
        self._wait(lambda: self._end is not None, "the root stage to finish the step")
        end, tensors = cast(tuple[End, list[torch.Tensor]], self._end)
        if end.wants_record:
            self._send(self.root_stage, self._own_record(), [])
        return unpack(end.outputs, tensors, module_of=self.hub.modules.__getitem__)

    def _step_task(self, task: Task, function: Callable[[], Any], modes: Any) -> None:
        self._begins(task.microbatch)
        try:
            with in_modes(modes):
                returned = function()
                packed = pack(returned, modules=self.hub.paths)
                if any(isinstance(tensor, Handle) for tensor in packed.tensors):
                    plain = [tensor.plain() if isinstance(tensor, Handle) else tensor for tensor in packed.tensors]
                    returned = unpack(packed.head, plain, module_of=self.hub.modules.__getitem__)
            self._microbatches.results[task.microbatch] = returned
        finally:
            self._begins(None)
        with self._lock:
            self._microbatches.reached_backward(task.microbatch)
            self._open_gates()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward pass that the script begins with ``model.backward``."""
        self.enter_backward()
        task = self.conductor.current
        if task is None:
            raise AssertionError("model.backward has checked that a task runs")
        task.in_model_backward = True
        try:
            yield
        finally:
            task.in_model_backward = False

    def enter_backward(self) -> None:
        """The calling task's script begins its backward pass; in the simple schedule it waits for all forward passes."""
        task = self.conductor.current
        if task is None or task.kind is not TaskKind.STEP or task.phase is TaskKind.BACKWARD:
            return
        with self._lock:
            task.phase = TaskKind.BACKWARD
            gate = self._microbatches.reached_backward(task.microbatch)
            self._open_gates()
        events: tuple[tuple[Any, ...], ...] = ()
        if gate is not None and self.conductor.order is None:
            events = (gate,)
        self.conductor.wait(task, events, lambda event: event in self._microbatches.open_gates())
        task.needs = ()

    def _open_gates(self) -> None:
        for gate in self._microbatches.open_gates():
            self.conductor.arrived(gate)
        self.conductor.poke()

    # -- the frame of a step ---------------------------------------------------------------------------------------

    def _enter_step(self) -> None:
        with self._lock:
            self._alarm.reset()
            self._begin = self._end = None
            self._records = {}
            self._diverged = False
            self._microbatches.clear()
            self.hub.learned = 0
            self._gate.enter()

    def _begin_step(self, begin: Begin) -> None:
        """The frame of the step is known."""
        with self._lock:
            self._begin = begin
            self.hub.seed = begin.seed
            order = self.plans.order(begin)
            self.conductor.reset(order, forward_first=self._forward_first, records=begin.is_recorded)
            # Without an order, microbatches run one after the other where their order counts or pipelines must agree on it.
            one_by_one = order is None and (self._share is not None or self.plans.order_counts(begin.kind))
            self._microbatches.active = 1 if one_by_one else self.active
            self._buffers = self.hub.buffer_versions()
            if self._recorder is not None:
                self._recorder.begin_step(self._gate.step)
        self._gate.begin()

    def _own_record(self) -> Record:
        with self._lock:
            changed = self.hub.buffer_versions() != self._buffers
            return Record(list(self.conductor.record), self.hub.learned, changed)

    def _close_step(self) -> None:
        with self._lock:
            self._gate.leave()
            if self._recorder is not None:
                self._recorder.end_step()
            self.hub.values.clear()
            self.server.clear()
            self.hub.replies.clear()
            self.hub.opened.clear()
            self._microbatches.clear()

    def _wait(self, is_true: Callable[[], bool], what: str) -> None:
        """On the script's own thread: wait for the step to get somewhere, with an eye on failures and stalls."""
        seconds = timeout_seconds()
        # Work that the order holds back although nothing else happens for the time of some steps: it does not fit.
        stall = min(STALL_SECONDS, 1.0 + 3 * self._longest_step)
        with self._lock:
            while not is_true():
                if self._alarm.error is not None:
                    raise self._alarm.error
                self._changed.wait(min(1.0, stall))
                quiet = time.perf_counter() - self.conductor.last_progress
                if self.conductor.order is not None and self.conductor.is_stalled and quiet > stall:
                    self._leave_order(f"nothing followed the planned order for {stall:.2g} s")
                    self.conductor.poke()
                if quiet > seconds and not self.conductor.is_running:
                    waiting = ", ".join(str(task) for task in self.conductor.waiting_tasks()) or "none"
                    raise DeadlineError(
                        f"pipeline stage {self.stage} (rank {self.ranks[self.stage]}) waited {seconds:.0f} s for {what}; its "
                        f"waiting tasks: {waiting}; check that every rank runs the same steps, or raise SMP_TIMEOUT_SECONDS"
                    )

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
        if message is None and (task.kind is TaskKind.FORWARD or caller not in self._gate.untold):
            return None
        tensors, task.parcel = list(task.parcel.values()), {}
        return functools.partial(self.transport.send, caller, self._gate.stamp(caller, message), tensors)

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
        self.server.release(microbatch)

    def _observe(self, task: Task, start: float, stop: float) -> None:
        """A segment has ended: into the timeline."""
        if self._recorder is not None:
            label = "" if task.kind is TaskKind.STEP else task.label
            self._recorder.add(
                f"{task.kind}{task.microbatch} {label}", task.kind.value, task.microbatch, label, start, stop
            )

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
        self._diverged = True
        self._open_gates()

    # -- messages --------------------------------------------------------------------------------------------------

    def _send(self, stage: int, message: Any, tensors: Sequence[torch.Tensor]) -> None:
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
                self._begin_step(message)
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
                    self._end = (message, tensors)
                    self._changed.notify_all()
            case Record():
                with self._lock:
                    self._records[sender] = message
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
                module.__dict__["_call_impl"] = RemoteEntry(self.caller, module, path)
                module.__dict__["_compiled_call_impl"] = None

    def close(self) -> None:
        """Take the pipeline down; modules of other stages cannot be called any more."""
        self.transport.close()
        self.conductor.close()
        if self._recorder is not None:
            self._recorder.close()
        for module in self.hub.modules.values():
            module.__dict__.pop("_call_impl", None)
