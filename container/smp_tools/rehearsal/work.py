"""Work of a step: floating point operations and bytes of every module, and the seconds that they would take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from smp_records.rehearsal import ModuleWork, TimedBlock
from smp_runtime.tensors.flop_formulas import flop_registry
from smp_runtime.tensors.torch_private import packet_of

if TYPE_CHECKING:
    import torch

    from smp_records.rate_card import Measured, RateCard
    from smp_runtime.comm.collectives import Work as Collective
    from smp_tools.rehearsal.memory import RankPhase
    from smp_tools.rehearsal.skip_compute_mode import SkippedOperation


class WorkClock:
    """The time of a rank that computes nothing: seconds of the work that it would have done.

    Attributes:
        now: seconds since the rehearsal began.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._sending_until = 0.0  # collectives of a rank follow one another

    def advance(self, seconds: float) -> None:
        """Advance the clock by seconds of computation."""
        self.now += seconds

    def launch(self, seconds: float) -> float:
        """Start a collective after those in progress, and return the time of its end."""
        self._sending_until = max(self._sending_until, self.now) + seconds
        return self._sending_until

    def wait_until(self, when: float) -> None:
        """Advance the clock to ``when``, if it is later than now."""
        self.now = max(self.now, when)


class TimedWork:
    """A collective with an end that the clock waits for.

    Args:
        inner: the collective itself.
        seconds: its duration.
    """

    def __init__(self, inner: Collective, clock: WorkClock, seconds: float) -> None:
        self._inner = inner
        self._clock = clock
        self._ends = clock.launch(seconds)

    def wait(self) -> object:
        """Return when the tensors can be used."""
        self._clock.wait_until(self._ends)
        return self._inner.wait()


class _Measurements:
    """Measured durations of modules for a microbatch, spread over their operations in proportion to the rates.

    A module without a measurement counts as part of the measured module around it. The number of operations of a module is known
    after a step; in the first step only the rates are used.

    Args:
        measured: durations by path and phase.
    """

    def __init__(self, measured: Iterable[Measured]) -> None:
        self._seconds: dict[tuple[str, str], float] = {(one.path, one.phase): one.seconds for one in measured}
        self._owners: dict[tuple[str, str], tuple[str, str] | None] = {}
        #: By module and phase, seconds by the rates and the microbatches that they are of, each with its call of a step.
        self._seen: dict[tuple[str, str], tuple[float, set[tuple[int, int]]]] = {}
        self._factors: dict[tuple[str, str], float] = {}

    def seconds(self, where: RankPhase, call: int, microbatch: int | None, by_rates: float) -> float | None:
        """Return the seconds of an operation, or None if no measured duration applies."""
        if not self._seconds or microbatch is None:
            return None
        owner = self._owner(where.module, where.phase)
        if owner is None:
            return None
        total, microbatches = self._seen.get(owner, (0.0, set()))
        microbatches.add((call, microbatch))
        self._seen[owner] = total + by_rates, microbatches
        factor = self._factors.get(owner)
        return None if factor is None else factor * by_rates

    def _owner(self, module: str, phase: str) -> tuple[str, str] | None:
        """Return the innermost measured module, with its phase, that contains an operation's module, or None."""
        key = module, phase
        if key not in self._owners:
            path = module
            while path and (path, phase) not in self._seconds:
                path = path.rpartition(".")[0]
            owner = path, phase
            self._owners[key] = owner if owner in self._seconds else None
        return self._owners[key]

    def learn(self) -> None:
        """End a step: update the factors between measured durations and the rates, for operations of the next step."""
        for owner, (total, microbatches) in self._seen.items():
            if total:
                self._factors[owner] = self._seconds[owner] * len(microbatches) / total
        self._seen.clear()


class ModuleTimes:
    """Totals of the modules' work, by phase and type.

    Args:
        where: returns the phase of the calling thread.
        rates: convert work to seconds; None stops the clock.
        measured: durations of modules that replace the rates.

    Attributes:
        microbatch: returns the calling thread's microbatch; None outside of one.
        call: returns the number of the step function's call that the microbatch belongs to.
        measured_seconds: seconds of the step so far that come from durations, not from rates.
        keeps_blocks: whether :meth:`blocks` is wanted.
    """

    def __init__(
        self,
        where: Callable[[], RankPhase],
        rates: RateCard | None,
        clock: WorkClock,
        measured: Iterable[Measured] = (),
    ) -> None:
        self._where = where
        self._rates = rates
        self._clock = clock
        self._measured = _Measurements(measured)
        self.microbatch: Callable[[], int | None] = lambda: None
        self.call: Callable[[], int] = lambda: 0
        self.measured_seconds = 0.0
        # Operations of backward passes run on threads of autograd.
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str, str], list[float]] = {}
        self._dtypes: dict[torch.dtype, str] = {}
        self.keeps_blocks = False
        self._blocks: list[tuple[str, int, float, float]] = []

    def begin(self) -> None:
        """Begin a step: reset all totals."""
        with self._lock:
            self._rows.clear()
            self._measured.learn()
            self.measured_seconds = 0.0
            self._blocks.clear()

    def performed(self, operation: SkippedOperation) -> None:
        """Count an operation that reads its arguments and writes its result."""
        function, made = operation.function, operation.made
        moved = sum([tensor.nbytes for tensor in made]) + sum([tensor.nbytes for tensor in operation.given])
        if not moved or function.__name__ in _WITHOUT_WORK:
            return
        formula = flop_registry.get(packet_of(function))
        flops = 0.0
        if formula is not None:
            flops = float(formula(*operation.args, **operation.kwargs, out_val=operation.result))
        widest = max(made, key=lambda tensor: tensor.nbytes, default=None)
        dtype = "" if widest is None else self._name(widest.dtype)
        seconds = 0.0 if self._rates is None else self._rates.seconds_of_work(flops, moved, dtype or "float32")
        where = self._where()
        with self._lock:
            microbatch = self.microbatch()
            known = self._measured.seconds(where, self.call(), microbatch, seconds)
            if known is not None:
                seconds = known
                self.measured_seconds += known
            row = self._rows.setdefault((where.module, where.phase, dtype), [0, 0.0, 0, 0.0])
            row[0] += 1
            row[1] += flops
            row[2] += moved
            row[3] += seconds
            if self.keeps_blocks and seconds:
                self._extend(_KINDS.get(where.phase, "S"), microbatch, seconds)
        self._clock.advance(seconds)

    def _extend(self, kind: str, microbatch: int | None, seconds: float) -> None:
        """Extend the current block of computation, or begin a new one."""
        now = self._clock.now
        before = self._blocks[-1] if self._blocks else ("", 0, 0.0, 0.0)
        number = before[1] if microbatch is None else microbatch
        if (kind, number, now) == (before[0], before[1], before[3]):
            self._blocks[-1] = (kind, number, before[2], now + seconds)
        else:
            self._blocks.append((kind, number, now, now + seconds))

    def blocks(self, began: float) -> list[TimedBlock]:
        """Return the blocks of computation in the step so far, without waits for others; for ranks without a pipeline.

        Args:
            began: start of the step, by the clock.
        """
        with self._lock:
            return [
                TimedBlock.model_validate(
                    {"kind": kind, "microbatch": number, "module": "", "start": start - began, "stop": stop - began}
                )
                for kind, number, start, stop in self._blocks
            ]

    def _name(self, dtype: torch.dtype) -> str:
        if dtype not in self._dtypes:
            self._dtypes[dtype] = str(dtype).removeprefix("torch.")
        return self._dtypes[dtype]

    def rows(self) -> list[ModuleWork]:
        """Return the work of the step so far, ordered by the first use of each module."""
        with self._lock:
            return [
                ModuleWork(
                    module=module,
                    phase=phase,
                    dtype=dtype,
                    calls=int(calls),
                    flops=flops,
                    bytes=int(moved),
                    seconds=seconds,
                )
                for (module, phase, dtype), (calls, flops, moved, seconds) in self._rows.items()
            ]


#: Letter of each phase in a timeline.
_KINDS = {"forward": "F", "backward": "B"}

#: Operations that only allocate.
_WITHOUT_WORK = {
    "empty.memory_format",
    "empty_like.default",
    "empty_strided.default",
    "new_empty.default",
    "new_empty_strided.default",
}
