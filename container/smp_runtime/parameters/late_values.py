"""Parameters and buffers of a deferred creation get their values, for good or for a look at them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.parameters.deferred_creation import Deferral, Deferrals, view_like
from smp_runtime.tensors.parameter_attributes import get_gradient
from smp_runtime.tensors.torch_private import storage_key, swap_contents

#: A parameter as it was recorded, and the one of the module that waits for its values.
StandIn = tuple[nn.Parameter, nn.Parameter]


def stand_ins(deferrals: Deferrals, module: nn.Module, make: Callable[[nn.Parameter], torch.Tensor]) -> list[StandIn]:
    """Make the parameters of ``module`` real that wait for their values; ``make`` gives the tensor that each becomes.

    They stay the same objects, which an optimizer may hold already.
    """
    found = []
    for parameter in list(module.parameters()):
        if any(deferral.owns(parameter) for deferral in deferrals):
            other = nn.Parameter(make(parameter), parameter.requires_grad)
            other.__dict__.update(parameter.__dict__)
            swap_contents(parameter, other)
            found.append((other, parameter))
    return found


def materialize(
    deferrals: Deferrals,
    module: nn.Module,
    device: torch.device,
    *,
    replaced: list[StandIn] | None = None,
    take: Callable[[nn.Parameter, torch.Tensor], None] | None = None,
) -> None:
    """Replay the deferrals that ``module`` was created in, and take them off the list.

    Random numbers follow on each other as in a creation without deferral: a context that began where the one before
    it began continues where that one ended, and so does the script, if it has drawn or seeded nothing since.

    Args:
        replaced: what :func:`stand_ins` gave; default: every parameter becomes a real one with its values.
        take: gets each replaced parameter with its value, one after the other; default: they are copied.
    """
    if replaced is None:
        replaced = stand_ins(deferrals, module, lambda meta: torch.empty(0, dtype=meta.dtype, device="cpu"))
    take = take or (lambda parameter, value: setattr(parameter, "data", value.to(device)))
    waiting = _LateReceiver()
    for meta, parameter in replaced:
        waiting.add(meta, functools.partial(take, parameter))
    for buffer, places in _late_buffers(module):
        waiting.add(buffer, functools.partial(_place, places, device))
    before, is_own = _replay(deferrals, waiting)
    for deferral in waiting.replayed:
        deferrals.remove(deferral)
    if before is not None and is_own and torch.equal(torch.get_rng_state(), before[0]):
        torch.set_rng_state(before[1])


def values_of(deferrals: Deferrals, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return copies on the CPU of the later values of tensors, by ``id``; the record stays as it is."""
    found: dict[int, torch.Tensor] = {}
    waiting = _LateReceiver()
    for tensor in tensors:
        if tensor.is_meta:
            waiting.add(tensor, functools.partial(_keep_copy, found, id(tensor)))
    _replay(deferrals, waiting)
    return found


class LateWrites:
    """Parameters and buffers without values before a pipeline's first step, with their version counters.

    Writing into them before that step has no effect, nor has setting a gradient, so it is refused.
    """

    def __init__(self, module: nn.Module) -> None:
        tensors = (*module.named_parameters(), *module.named_buffers())
        self._versions = {name: (tensor, tensor._version) for name, tensor in tensors if tensor.is_meta}

    def refuse(self) -> None:
        """Check that the script has written into none of them; call it before the library itself writes.

        Raises:
            SMPUserError: it has.
        """
        written = [
            name
            for name, (tensor, version) in self._versions.items()
            if tensor._version != version or (tensor.is_leaf and get_gradient(tensor) is not None)
        ]
        self._versions = {}
        if written:
            raise SMPUserError(
                f"the script has written into {len(written)} tensors, or their gradients, that have no values before a pipeline's "
                f"first step, the first {written[0]}: smp.delay_param_initialization() or smp.model_creation() created them; write "
                "inside that context, load a state with model.load_state_dict(), or write after the first step",
                code="SMP303",
            )


#: The dictionaries of buffers that have a tensor, and its name in each.
_Places = list[tuple[dict[str, Any], str]]


def _late_buffers(module: nn.Module) -> list[tuple[torch.Tensor, _Places]]:
    """Return the module's buffers without values, each once, with all their places."""
    found: dict[int, tuple[torch.Tensor, _Places]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            _, places = found.setdefault(id(buffer), (buffer, []))
            places.append((owner._buffers, name))
    return list(found.values())


def _place(places: _Places, device: torch.device, value: torch.Tensor) -> None:
    """Put a buffer in all its places; one with several names stays one."""
    moved = value.to(device)
    for buffers, name in places:
        buffers[name] = moved


def _keep_copy(found: dict[int, torch.Tensor], key: int, value: torch.Tensor) -> None:
    found[key] = value.clone()


class _LateReceiver:
    """The receivers of values, by storage.

    Attributes:
        replayed: the deferrals that had some of them.
    """

    def __init__(self) -> None:
        self._takers: dict[int, list[tuple[torch.Tensor, Callable[[torch.Tensor], object]]]] = {}
        self.replayed: list[Deferral] = []

    def add(self, meta: torch.Tensor, take: Callable[[torch.Tensor], object]) -> None:
        self._takers.setdefault(storage_key(meta), []).append((meta, take))

    def are_in(self, deferral: Deferral) -> bool:
        takers = itertools.chain.from_iterable(self._takers.values())
        return any(deferral.owns(meta) for meta, _ in takers)

    def finished(self, storage: int, real: torch.Tensor) -> None:
        for meta, take in self._takers.get(storage, ()):
            take(view_like(meta, {storage: real}))


def _replay(deferrals: Deferrals, waiting: _LateReceiver) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, bool]:
    """Replay the deferrals that something waits for.

    Returns:
        The states of the random generator in which the last was left and in which its replay has ended, or None; and whether
        the numbers are this rank's own.
    """
    before: tuple[torch.Tensor, torch.Tensor] | None = None
    is_own = True
    for deferral in list(deferrals):
        if not waiting.are_in(deferral):
            continue
        waiting.replayed.append(deferral)
        numbers = deferral.numbers
        agreed = deferral.agreed
        continues = before is not None and torch.equal(numbers.start, before[0])
        if before is not None and continues:
            agreed = agreed._replace(start=before[1])
        end = deferral.replay(agreed, waiting.finished)
        before = (deferral.left, end)
        is_own = continues or torch.equal(agreed.start, numbers.start)
    return before, is_own
