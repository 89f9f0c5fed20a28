"""Work of a step: floating point operations and bytes of every module, and the seconds that they would take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from smp_config.rehearsal import ModuleWork
from smp_runtime.tensors.flop_formulas import flop_registry
from smp_runtime.tensors.torch_private import packet_of

if TYPE_CHECKING:
    import torch

    from smp_config.rate_card import RateCard
    from smp_runtime.comm.collectives import Work as Collective
    from smp_runtime.rehearsal.memory import Where
    from smp_runtime.rehearsal.operations import Operation


class Clock:
    """The time of a rank that computes nothing: seconds of the work that it would have done.

    Attributes:
        now: seconds since the rehearsal began.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._sending_until = 0.0  # collectives of a rank follow one another

    def advance(self, seconds: float) -> None:
        """The rank has computed."""
        self.now += seconds

    def launch(self, seconds: float) -> float:
        """Start a collective behind those under way; gives the time of its end."""
        self._sending_until = max(self._sending_until, self.now) + seconds
        return self._sending_until

    def wait_until(self, when: float) -> None:
        """Something is needed that is there at a time."""
        self.now = max(self.now, when)


class TimedWork:
    """A collective whose end the clock waits for.

    Args:
        inner: the collective itself.
        seconds: that it takes.
    """

    def __init__(self, inner: Collective, clock: Clock, seconds: float) -> None:
        self._inner = inner
        self._clock = clock
        self._ends = clock.launch(seconds)

    def wait(self) -> object:
        """Return when the tensors can be used."""
        self._clock.wait_until(self._ends)
        return self._inner.wait()


class ModuleTimes:
    """Adds up what modules do, by phase and type.

    Args:
        where: what the calling thread is at.
        rates: turns work into seconds; None: the clock stands still.
    """

    def __init__(self, where: Callable[[], Where], rates: RateCard | None, clock: Clock) -> None:
        self._where = where
        self._rates = rates
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str, str], list[float]] = {}
        self._dtypes: dict[torch.dtype, str] = {}

    def begin(self) -> None:
        """Forget what was: another step begins."""
        with self._lock:
            self._rows.clear()

    def performed(self, operation: Operation) -> None:
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
            row = self._rows.setdefault((where.module, where.phase, dtype), [0, 0.0, 0, 0.0])
            row[0] += 1
            row[1] += flops
            row[2] += moved
            row[3] += seconds
        self._clock.advance(seconds)

    def _name(self, dtype: torch.dtype) -> str:
        if dtype not in self._dtypes:
            self._dtypes[dtype] = str(dtype).removeprefix("torch.")
        return self._dtypes[dtype]

    def rows(self) -> list[ModuleWork]:
        """Of the step so far, in the order in which modules came first."""
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


#: Operations that only allocate.
_WITHOUT_WORK = {
    "empty.memory_format",
    "empty_like.default",
    "empty_strided.default",
    "new_empty.default",
    "new_empty_strided.default",
}
