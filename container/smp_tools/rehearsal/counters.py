"""All that is counted of one kind of rank, put together, and the steps in which it is counted."""

from __future__ import annotations

import resource
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_records.rehearsal import KindReport, TimedBlock
from smp_runtime.activations import offloading
from smp_runtime.pipeline.execution import plan_store
from smp_runtime.pipeline.schedule.actions import TaskKind
from smp_runtime.step.microbatches import batch_samples
from smp_runtime.tensors import computing_time
from smp_runtime.tensors.torch_private import dispatch_modes, stay_in
from smp_tools.rehearsal.fake_collectives import CollectiveLedger, CountedCollectives, DirectCollectives
from smp_tools.rehearsal.fake_p2p import LinkCounter
from smp_tools.rehearsal.memory import LiveMemory, by_kind, largest_holders
from smp_tools.rehearsal.module_inventory import ModuleInventory
from smp_tools.rehearsal.phases import Phases
from smp_tools.rehearsal.skip_compute_mode import SkipComputeMode
from smp_tools.rehearsal.work import ModuleTimes, TimedWork, WorkClock

if TYPE_CHECKING:
    import torch.distributed as dist

    from smp_records.rate_card import RateCard
    from smp_runtime.comm.collectives import Collectives, Work
    from smp_runtime.job.session import Session
    from smp_runtime.pipeline.schedule.actions import Segment
    from smp_runtime.pipeline.schedule.planner import SchedulePlan
    from smp_tools.rehearsal.data import Loaders


class RehearsalOver(BaseException):
    """As many steps as were asked for are over. Not an exception that a script would catch."""


class Counters:
    """Counts on all threads of this process from :meth:`start` to :meth:`stop`, in steps of a session.

    Args:
        steps: after which :class:`RehearsalOver` is raised out of the script; the last is reported.
        performed_bytes: of an operation that is really done, at most; None: all are, as in a job.
        rates: turns work into seconds.

    Attributes:
        links: what goes to other stages.
    """

    def __init__(self, steps: int, performed_bytes: int | None, rates: RateCard | None = None) -> None:
        self._steps = steps
        self._session: Session | None = None
        self.phases = Phases()
        self.clock = WorkClock()
        self.memory = LiveMemory(self.phases.where, lambda: self.clock.now)
        self.ledger = CollectiveLedger(self.phases.where)
        self._rates = rates
        self._has_clock = rates is not None
        self.work = ModuleTimes(self.phases.where, rates, self.clock, () if rates is None else rates.measured)
        self.links = LinkCounter()
        self._direct = DirectCollectives(self.ledger)
        self.mode = SkipComputeMode([self.memory, self.work], self._direct, performed_bytes)
        self._planned: SchedulePlan | None = None
        self._segments: Sequence[Segment] = ()
        self._put_back: list[Callable[[], object]] = []
        self.holdings = ModuleInventory()
        self.loaders: Loaders | None = None
        self._samples = self._batches = self._runs = 0
        self._made: KindReport | None = None
        self.step = -1
        self._uses_steps = False
        self._updated = False
        self._began = 0.0
        self._active = 1
        self._first_step_peak = 0

    def start(self) -> None:
        """Count from now on, on this thread and on those that it starts, and on theirs."""
        stay_in(self.mode)
        offloading.in_host_memory.append(self.memory.in_host_memory)
        self._put_back.append(offloading.in_host_memory.pop)
        plan_store.at_plan.append(self._hear_plan)
        self._put_back.append(plan_store.at_plan.clear)
        if self._has_clock:
            computing_time.clocks.append(lambda: self.clock.now)
            self._put_back.append(computing_time.clocks.pop)
        mode, run, start = self.mode, threading.Thread.run, threading.Thread.start
        resize, memory = torch.UntypedStorage.resize_, self.memory
        followed: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

        def started(thread: threading.Thread) -> None:
            if mode in dispatch_modes():  # else what computes here is not of the training
                followed.add(thread)
            start(thread)

        def entered(thread: threading.Thread) -> None:
            if thread in followed:
                stay_in(mode)
            run(thread)

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            memory.resized(storage)
            return result

        threading.Thread.start = started  # type: ignore[method-assign, assignment]
        threading.Thread.run = entered  # type: ignore[method-assign, assignment]
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        self._put_back += [
            lambda: setattr(threading.Thread, "run", run),
            lambda: setattr(threading.Thread, "start", start),
            lambda: setattr(torch.UntypedStorage, "resize_", resize),
            self.phases.close,
        ]

    def _hear_plan(self, planned: SchedulePlan, segments: Sequence[Segment]) -> None:
        if any(
            segment.phase is TaskKind.BACKWARD for segment in segments
        ):  # not of an evaluation, which has its own order
            self._planned = planned
            self._segments = segments

    def _pipeline_blocks(self) -> dict[int, list[TimedBlock]]:
        """Return each stage's timed blocks of computation, in the planned order."""
        found: dict[int, list[TimedBlock]] = {}
        for segment in self._segments if self._planned is not None else ():
            action = segment.action
            start = self._planned.start.get(action) if self._planned is not None else None
            if start is not None and segment.seconds:
                kind = segment.phase if action.kind is TaskKind.STEP else action.kind
                block = TimedBlock(
                    kind=kind.value,
                    microbatch=action.microbatch,
                    module=segment.label,
                    start=start,
                    stop=start + segment.seconds,
                )
                found.setdefault(segment.rank, []).append(block)
        return {stage: sorted(blocks, key=lambda one: one.start) for stage, blocks in sorted(found.items())}

    def stop(self) -> None:
        """Count no more on threads that begin now."""
        while self._put_back:
            self._put_back.pop()()

    def counted(self, collectives: Collectives) -> CountedCollectives:
        """Return the same collectives with counters."""
        found = CountedCollectives(collectives, self.ledger, self._timed if self._has_clock else None)
        self._direct.counted = found.counted
        return found

    def _timed(self, kind: str, nbytes: int, group: dist.ProcessGroup, work: Work) -> Work:
        """Return a collective that takes as long as the rates predict."""
        rates = self._rates
        if rates is None or group.size() == 1:
            return work
        hosts = self.ledger.name_of(group)[1]
        if kind == "send":
            seconds = rates.seconds_of_exchange(nbytes, group.size(), hosts)
        else:
            seconds = rates.seconds_of_collective(kind, nbytes, group.size(), hosts)
        return TimedWork(work, self.clock, seconds)

    def follow(self, session: Session, hosts_of: Callable[[list[int]], int]) -> None:
        """Count in the steps of a session that has just begun."""
        self._session = session
        ranks = session.ranks
        names: dict[int, tuple[str, int]] = {}
        for kind in (
            Group.TP,
            Group.PP,
            Group.CONTEXT,
            Group.DP,
            Group.RDP,
            Group.SHARD,
            Group.REPLICA,
            Group.MP,
            Group.WORLD,
        ):
            # A group of several kinds is called by the first of them.
            names.setdefault(id(ranks.groups.group(kind)), (kind.value, hosts_of(ranks.members(kind))))
        self.ledger.name_of = lambda group: names.get(id(group), ("other", 1))
        self.phases.in_microbatch = lambda: ranks.step.microbatch is not None
        self.work.microbatch = self.memory.microbatch = lambda: ranks.step.microbatch
        self.work.call = lambda: ranks.step.count
        self._active = min(ranks.cfg.active_microbatches or 1, ranks.cfg.microbatches)
        self.work.keeps_blocks = ranks.size(Group.PP) == 1
        replicas = ranks.size(Group.BATCH_RDP if ranks.cfg.prescaled_batch else Group.BATCH_DP)

        def count_samples(values: list[Any], axes: list[int | None]) -> list[Any]:
            if torch.is_grad_enabled():
                self._runs += 1
                pairs = zip(values, axes, strict=True)
                split = [(value, axis) for value, axis in pairs if axis is not None]
                split_values = [value for value, _ in split]
                split_axes = [axis for _, axis in split]
                self._samples += replicas * batch_samples(split_values, split_axes)
            return values

        session.arguments.append(count_samples)
        session.before_step.append(self._step_called)
        session.after_update.append(self._updates)

    def _step_called(self) -> None:
        self._uses_steps = True
        if self.step < 0 or self._updated:
            self._begin_step()

    def _updates(self, optimizer: Any) -> None:
        self._updated = True
        self._mark(optimizer)
        if not self._uses_steps:
            self._begin_step()

    def _begin_step(self) -> None:
        self._updated = False
        self.step += 1
        if self.loaders is not None:
            self._batches, self.loaders.batches = self.loaders.batches, 0
        if self.step == self._steps:
            self._made = self._report()  # before the script lets go of its model
            raise RehearsalOver
        if self.step == 0:
            self.memory.begin_reserving()
        if self.step == 1:
            self._first_step_peak = self.memory.peak
        if self.step >= 1:  # the last step counts: by then a pipeline runs in its planned order
            self.memory.watch_peak()
        self.phases.in_steps = True
        self.ledger.step = self.links.step = self.step
        if self.ledger.calls is not None:
            self.ledger.calls.step = self.step
        self._samples = self._runs = 0
        self._began = self.clock.now
        self.work.begin()
        self.memory.begin_curve()
        for model in self._session.models if self._session is not None else ():
            self.phases.name(model.module)

    def _mark(self, optimizer: Any) -> None:
        """Mark the kinds of all tensors of models and of an optimizer, after the optimizer has created them."""
        models: list[Any] = list(self._session.models) if self._session is not None else []
        trained: list[Any] = []
        for group in optimizer.param_groups:
            trained += group["params"]
        # Masters and shards; those of a model are marked again below.
        self.memory.mark("optimizer state", trained)
        for state in optimizer.state.values():
            if isinstance(state, dict):
                tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
                self.memory.mark("optimizer state", tensors)
        for model in models:
            parameters = list(model.parameters())
            self.memory.mark("gradient", [parameter.grad for parameter in (*parameters, *trained)])
            shards = [getattr(parameter, "ds_tensor", None) for parameter in parameters]
            self.memory.mark("parameter", [*shards, *parameters, *model.buffers()])
        if self._session is not None:
            self.holdings.look(models, self._session.ranks.rank_in(Group.PP), self.phases.called)

    def report(self, stage: int, rank: int, stands_for: int) -> KindReport:
        """Return all counts up to the end of the last step, or of a script that ended before."""
        made = self._made or self._report()
        return made.model_copy(update={"stage": stage, "rank": rank, "stands_for": stands_for})

    def _report(self) -> KindReport:
        memory, holders = self.memory, self.memory.at_peak()
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return KindReport(
            stage=0,
            rank=0,
            stands_for=1,
            parameters=self.holdings.parameters,
            trained_parameters=self.holdings.trained_parameters,
            idle_parameters=self.holdings.idle_parameters,
            modules=self.holdings.modules,
            idle_modules=self.holdings.idle_modules,
            steps=max(self.step, 0),
            peak_bytes=memory.peak,
            peak_phase=memory.peak_at.phase,
            peak_module=memory.peak_at.module,
            peak_line=memory.peak_line,
            resident_bytes=memory.now,
            first_step_peak_bytes=self._first_step_peak or memory.peak,
            classes=by_kind(holders),
            holders=largest_holders(holders),
            curve=memory.curve(),
            collectives=self.ledger.counts(),
            links=self.links.counts(),
            work=self.work.rows(),
            step_seconds=self.clock.now - self._began,
            measured_seconds=self.work.measured_seconds,
            microbatch_bytes=memory.most_of_microbatch,
            active_microbatches=self._active,
            in_flight={} if self._planned is None else dict(self._planned.in_flight),
            host_peak_bytes=memory.host_peak,
            reserved_bytes=memory.reserved,
            pipeline_seconds=None if self._planned is None else self._planned.makespan,
            pipeline_runs=max(1, self._runs),
            pipeline_idle={} if self._planned is None else dict(self._planned.idle),
            pipeline_blocks=self._pipeline_blocks(),
            blocks=self.work.blocks(self._began),
            epoch_batches=None if self.loaders is None else self.loaders.epoch_batches,
            step_batches=self._batches,
            step_samples=self._samples,
            process_bytes=used if sys.platform == "darwin" else used * 1024,
        )
