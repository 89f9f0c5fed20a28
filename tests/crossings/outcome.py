"""What became of a case: equal to one process, refused by name, or a fault."""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from crossings.alone import Alone
from crossings.case import TOPOLOGIES, Case
from crossings.job import train_case
from crossings.version2_case import Version2Case
from crossings.version2_events import AloneInVersion2
from crossings.version2_job import train_version2_case
from crossings.version2_nets import find_net
from support.ranks.rank_pool import RankFailed, RankPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from crossings.training import Record

#: A case of either version.
AnyCase = Case | Version2Case

#: Errors by which the library may refuse what is combined, and why.
REFUSALS: dict[str, str] = {
    r"has written into \d+ tensors, or their gradients": "a script writes into late tensors before a pipeline's first step",
    r"writes into sharded parameters in its forward pass": "a checkpointed module moves its own sharded parameters",
    r"was called again on stage \d+ in backward, by a checkpointed region around it": "a model checkpoints across stages",
    r"gradients of \d+ parts of parameters after update_master_grads": "fp16: a script scales gradients behind their clipping",
    r"was frozen when the model was wrapped and has requires_grad now": "a layer frozen before smp.reshape trains again",
}

#: What PyTorch itself says where it has no kernel of a type for this processor, as of an LSTM in bfloat16.
_NO_KERNEL = "could not create a primitive descriptor"

#: Relative differences of losses, norms and state; half precision is compared with what it rounds.
_LIMITS = {"float64": 1e-9, "float32": 2e-4, "autocast": 3e-2, "bf16": 3e-2, "fp16": 3e-2}

#: Of all updates together, in half precision: how far they may lie from the ones that nothing rounds.
_UPDATES = 0.2
_ROUNDING = {"autocast": 0.0, "bf16": 2**-8, "fp16": 2**-11}


#: Of so many cases that are equal, one is repeated in fresh processes: ranks run one case after the other.
_REPEATED = 20


def read_case(text: str) -> AnyCase:
    """Return the case of a line of JSON."""
    is_version_2 = json.loads(text).get("version") == 2
    return Version2Case.from_json(text) if is_version_2 else Case.from_json(text)


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        kind: ``equal``, ``refused``, ``wrong``, ``error`` or ``hang``; ``unsteady`` if it ended otherwise in fresh processes.
        detail: the reason of a refusal, the first difference, or the error.
        processor_seconds: of all ranks and of the one process; 0 if a rank has failed.
    """

    kind: str
    detail: str
    seconds: float
    processor_seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        """Return whether the library must not do this."""
        return self.kind not in ("equal", "refused")

    def to_line(self, number: int, case: AnyCase) -> dict[str, object]:
        """A line of a report."""
        seconds = {"seconds": round(self.seconds, 2), "processor_seconds": round(self.processor_seconds, 2)}
        return {
            "number": number,
            "kind": self.kind,
            "detail": self.detail,
            **seconds,
            "case": json.loads(case.to_json()),
        }


class Runner:
    """Runs cases in a pool of ranks, which a fault ends.

    Each fault, and one of 20 equal cases, is repeated in a fresh pool: what one case leaves behind in a rank could make the next
    one fail, or pass.

    Args:
        ranks: runs a function on ranks, as :meth:`RankPool.run` does; default: those of a pool of its own.
        repeats: whether to repeat cases; never with given ranks.
        prepare: what to do with each new pool, before it runs the first case.
        timeout: seconds for a case, unless its ranks compute; with a pool of its own.
    """

    def __init__(
        self,
        ranks: Callable[..., list[Record]] | None = None,
        *,
        repeats: bool = True,
        prepare: Callable[[RankPool], object] | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._timeout = timeout
        self._ranks = ranks
        self._prepare = prepare
        self._repeats = repeats and ranks is None
        self._pool: RankPool | None = None
        self._equal = 0
        self._has_run = False  # in the pool of now

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._has_run = False

    def _run(self, *args: Any) -> list[Record]:
        if self._ranks is not None:
            return self._ranks(*args, init=False)
        if self._pool is None:
            most = max(world for world, *_ in TOPOLOGIES.values())
            self._pool = RankPool(most, imports=["support.ranks.loaded_transformers"])
            if self._prepare is not None:
                self._prepare(self._pool)
        return self._pool.run(*args, init=False, timeout=self._timeout)

    def run(self, case: AnyCase) -> Outcome:
        """Train the case both ways, and compare; a second time in fresh processes where it may depend on what ran before."""
        was_fresh = not self._has_run
        outcome = self.run_once(case)
        self._equal += outcome.kind == "equal"
        is_due = outcome.is_fault or (outcome.kind == "equal" and self._equal % _REPEATED == 0)
        if was_fresh or not (self._repeats and is_due):
            return outcome
        self._close()
        again = self.run_once(case)
        if again.kind == outcome.kind:
            return outcome
        detail = f"{outcome.kind} after other cases, {again.kind} in fresh processes\n{outcome.detail}\n{again.detail}"
        return Outcome("unsteady", detail, outcome.seconds + again.seconds)

    def run_once(self, case: AnyCase) -> Outcome:
        """Train the case both ways, and compare."""
        begin, own = time.monotonic(), time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                train = train_version2_case if isinstance(case, Version2Case) else train_case
                records = self._run(train, case.world, case.to_json(), folder)
            except RankFailed as error:
                self._close()
                kind, detail = _judge(str(error))
                return Outcome(kind, detail, time.monotonic() - begin)
        self._has_run = True
        found = compare(case, _train_alone(case, records[0]), records)
        if found:
            self._close()
        used = time.process_time() - own + sum(record.processor_seconds for record in records)
        return Outcome("wrong" if found else "equal", found, time.monotonic() - begin, used)


def _train_alone(case: AnyCase, first: Record) -> Record:
    """Train a case in one process; it begins with the weights that ranks have drawn, if they drew them late."""
    return AloneInVersion2(case, first.first).run() if isinstance(case, Version2Case) else Alone(case).run()


def _judge(error: str) -> tuple[str, str]:
    """Kind and detail of a failed run."""
    if "gave no result" in error or ("waited" in error and " s in " in error):
        return "hang", error[-2000:]
    last = next((line for line in reversed(error.splitlines()) if re.match(r"[\w.]*(Error|Exception)\b", line)), "")
    name, _, message = last.partition(": ")
    if _NO_KERNEL in error:
        return "refused", "PyTorch has no kernel of this type for this processor"
    for pattern, reason in REFUSALS.items():
        if name.startswith(("smp_runtime.", "smp_config.")) and re.search(pattern, message):
            return "refused", reason
    return "error", error[-4000:]


def _limit_of(case: AnyCase) -> float:
    """Return the relative difference that a case may have; Mixtral's router computes in float32 in any precision."""
    if isinstance(case, Version2Case) and case.precision == "float64" and case.net == "mixtral" and case.splits:
        return 1e-4  # split layers round in another order
    if case.precision == "float32" and case.optimizer == "muon":
        return (
            2e-3  # elements at a border go another way when they are rounded to bfloat16, where sums have another order
        )
    return 1e-7 if case.precision == "float64" and case.net == "mixtral" else _LIMITS[case.precision]


def compare(case: AnyCase, alone: Record, ranks: list[Record]) -> str:
    """The first difference between a job and one process; empty where there is none."""
    limit = _limit_of(case)
    for rank, record in enumerate(ranks):
        for what in ("losses", "scores", "norms"):
            mine, right = getattr(record, what), getattr(alone, what)
            if len(mine) != len(right):
                return f"rank {rank}: {len(mine)} {what} for {len(right)}"
            for number, (one, other) in enumerate(zip(mine, right, strict=True)):
                # PyTorch's function gives norms in float32, and rounded gradients make another norm.
                allowed = limit if what != "norms" else max(3 * limit, 1e-7)
                # Anything is within a part of infinity.
                if not math.isfinite(other) or not abs(one - other) <= allowed * max(abs(other), 0.1):
                    return f"rank {rank}: {what}[{number}] is {one!r} for {other!r}"
        if record.stale:
            return f"rank {rank}: rounded weights that are not the float32 ones: {sorted(record.stale)[:4]}"
        if found := _different_state(case, alone, record, is_first=rank == 0):
            return f"rank {rank}: {found}"
    return ""


def _different_state(case: AnyCase, alone: Record, record: Record, *, is_first: bool) -> str:
    limit, names = _limit_of(case), list(alone.last)
    if record.last.keys() != alone.last.keys():
        if not find_net(case.net).from_transformers:  # of these a distributed form may have other names
            return f"other names at the end: {sorted(record.last.keys() ^ alone.last.keys())[:4]}"
        names = [name for name in names if name in record.last and record.last[name].shape == alone.last[name].shape]
    if not is_first:  # running statistics of other replicas are taken over with the next forward pass
        names = [name for name in names if name in alone.parameters]
    for name, value in record.first.items():
        if not case.is_half and name in names and not torch.allclose(value, alone.first[name], rtol=1e-6, atol=1e-7):
            return f"{name} begins with other values"
    # Weights that a script puts back are rounded ones, and float32 weights take them over.
    is_put_back = any(event.kind == "swap_weights" for event in case.events)
    off, moved, size = 0.0, 0.0, 0.0
    for name in names:
        value, right = record.last[name], alone.last[name]
        if value.shape != right.shape:
            return f"{name} has the shape {list(value.shape)} for {list(right.shape)}"
        if not (value.isfinite().all() and right.isfinite().all()):
            return f"{name} is not finite, in {'the job' if right.isfinite().all() else 'one process'}"
        difference = (value - right).abs()
        if case.is_rounded and _has_not_moved(name, difference, alone):
            return f"{name} is off by {float(difference.max()):.3g}, more than half of what it moves by"
        if not case.is_rounded and not bool((difference <= limit * right.abs().clamp_min(0.1)).all()):
            return f"{name} is off by {float(difference.max()):.3g}"
        off += float(difference.square().sum())
        moved += float((right - alone.first[name]).square().sum())
        size += float(right.square().sum()) if is_put_back or name not in record.exact else 0.0
    if case.is_rounded and not off**0.5 <= _UPDATES * moved**0.5 + _ROUNDING[case.precision] * size**0.5:
        return f"updates are off by {(off / moved) ** 0.5:.3g} of their norm"
    return ""


def _has_not_moved(name: str, difference: torch.Tensor, alone: Record) -> bool:
    """Return whether a buffer that changes lacks half of its change: what is added to it may be rounded away."""
    if name in alone.parameters or name not in alone.first:
        return False
    moved = float((alone.last[name] - alone.first[name]).square().sum().sqrt())
    noise = 1e-5 * float(alone.last[name].square().sum().sqrt())
    return moved > 0 and float(difference.square().sum().sqrt()) > max(0.5 * moved, noise)
