"""Whether an optimizer can go on from a saved state: another kind of optimizer keeps other values of each parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from smp_runtime.errors import CheckpointError

#: Kinds that keep the same values and mean the same by them.
_ALIKE = [{"Adam", "AdamW"}]
#: Classes that older releases of PyTorch lack, and this library has under the same name.
_LATER = {"Muon"}
#: Settings that ask for kernels of another device, or for graphs.
_OF_KERNELS = {"foreach", "fused", "capturable", "differentiable"}
#: Of parameters that an update is tried on: some kinds keep other values of a matrix, or take nothing else.
_TRIALS = ((2,), (2, 2))
#: Types of the attributes that determine an optimizer's update.
_PLAIN = (bool, int, float, str, tuple, type(None))


def refuse_state_of_others(
    optimizer: torch.optim.Optimizer,
    groups: Iterable[Mapping[str, Any]],
    keys: Iterable[Collection[str]],
    title: str,
    kind: str = "",
) -> None:
    """Raise unless ``optimizer`` can continue from a saved state.

    Args:
        optimizer: the optimizer that is to load it.
        groups: the saved settings by group.
        keys: by parameter, the names of its saved values.
        title: of the checkpoint, for the message.
        kind: class of the optimizer that saved it; empty if the file does not record it.

    Raises:
        CheckpointError: If ``optimizer`` keeps other values, or is known to be of another kind.
    """
    mine, groups = type(optimizer).__name__, list(groups)
    if _are_alike(kind, mine):
        return
    saved = [set(names) for names in keys if names]
    expected = _expected(optimizer, groups)
    if saved:
        fits = any(expected) and all(_has_one_of(names, expected) for names in saved)
    else:  # nothing was updated yet
        fits = not any(_lacking(optimizer, settings) for settings in groups)
    is_misfit = bool(expected) and not fits
    if is_misfit or _are_of_pytorch(kind, mine):
        raise _error(title, kind or "another optimizer", mine, set().union(*saved), set().union(*expected))


def _has_one_of(names: set[str], expected: Iterable[set[str]]) -> bool:
    return any(each <= names for each in expected)


def _error(title: str, kind: str, mine: str, saved: set[str], expected: set[str]) -> CheckpointError:
    return CheckpointError(
        f"{title} has the state of {kind}, which cannot be loaded into {mine}: it holds {_listed(saved)} of each parameter, and "
        f"{mine} keeps {_listed(expected)}; resume with the optimizer that saved it, or load the weights alone "
        f"(load_optimizer=False), and {mine} begins anew"
    )


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"


def _are_of_pytorch(*kinds: str) -> bool:
    """Return whether all names are of classes of ``torch.optim``, so that a name identifies the class."""
    if not all(kinds):
        return False
    return all(kind in _LATER or isinstance(getattr(torch.optim, kind, None), type) for kind in kinds)


def _are_alike(kind: str, other: str) -> bool:
    if kind == other:
        return True
    return any({kind, other} <= alike for alike in _ALIKE)


def _expected(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> list[set[str]]:
    """Return what ``optimizer`` may keep of a parameter, by the names of the values; empty if that cannot be learned.

    With the saved settings, which it would load too: they decide whether there is a momentum.
    """
    found: list[set[str]] = []
    for group, settings in zip(optimizer.param_groups, groups, strict=False):
        kept = {key: value for key, value in settings.items() if key in group}
        for shape in _TRIALS:
            names = _tried(optimizer, {**group, **kept}, shape)
            if names is not None:
                found.append(names)
    # Some make their values at once, not in the first update.
    if not found:
        found = [set(values) for values in optimizer.state.values()]
    return found


def _lacking(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> set[str]:
    """Return settings that ``optimizer`` reads and a saved group does not have, nor gets as one of an older release."""
    try:
        trial = _another(optimizer, {**settings, "params": []})
    except Exception:  # of a class that needs more than that
        return set()
    return set(optimizer.defaults) - set(trial.param_groups[0]) - _OF_KERNELS


def _another(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Any:
    """Return another object of the optimizer's class, without state, with this group."""
    made: Any = object.__new__(type(optimizer))
    vars(made).update({key: value for key, value in vars(optimizer).items() if isinstance(value, _PLAIN)})
    made.__setstate__({"state": defaultdict(dict), "param_groups": [group], "defaults": optimizer.defaults})
    return made


def _tried(optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: tuple[int, ...]) -> set[str] | None:
    """Return what another object of the class keeps of a parameter after an update; None if it cannot be tried."""
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    settings = {key: False if key in _OF_KERNELS else value for key, value in group.items()}
    try:
        trial = _another(optimizer, {**settings, "params": [parameter]})
        type(optimizer).step(trial)
    except Exception:  # of a class that needs more than that
        return None
    return {key for values in trial.state.values() for key in values}
