"""Muon: momentum whose matrices are made orthogonal before each step, and AdamW for all that is no hidden matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.optim.fused import ApexOptimizer, update_by_adam
from smp_runtime.optim.matrices.dtensors import gathered, is_dtensor, part_here
from smp_runtime.optim.matrices.exchange import Matrices, Settings, WholeMatrices, update_here, whole_here
from smp_runtime.optim.matrices.rule import hidden_matrices

if TYPE_CHECKING:
    from smp_runtime.optim.matrices.regions import Region

#: Of the quintic iteration, with the steepest slope at zero (Jordan et al., "Muon: An optimizer for hidden layers").
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: Ways to scale the rate to the shape of a matrix.
ADJUSTMENTS = (None, "original", "match_rms_adamw")

Coefficients: TypeAlias = tuple[float, float, float]


def orthogonalized(direction: torch.Tensor, coefficients: Coefficients, steps: int, eps: float) -> torch.Tensor:
    """Return a matrix with the singular vectors of ``direction`` and singular values near 1, by Newton–Schulz iterations.

    The operations are those of ``torch.optim.Muon``, in the type of ``direction``; this may be changed.

    Args:
        direction: ``[rows, columns]``, in memory of its own.
        eps: least norm that it is divided by.
    """
    a, b, c = coefficients
    is_tall = direction.shape[0] > direction.shape[1]
    found = direction.T if is_tall else direction
    found.div_(found.norm().clamp(min=eps))
    after = torch.empty_like(found)
    gram, polynomial = (found.new_empty(found.shape[0], found.shape[0]) for _ in range(2))
    for _ in range(steps):
        torch.mm(found, found.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.addmm(found, polynomial, found, beta=a, out=after)
        found, after = after, found
    return found.T if is_tall else found


def adjusted_rate(rate: float, adjustment: str | None, shape: Sequence[int]) -> float:
    """Return the learning rate of a matrix of a shape, as ``torch.optim.Muon`` does."""
    rows, columns = shape
    if adjustment == "match_rms_adamw":
        return rate * 0.2 * math.sqrt(max(rows, columns))
    return rate * math.sqrt(max(1, rows / columns))


class MuonUpdate:
    """What Muon does with matrices; an optimizer's state and groups are read and written.

    Directions and updates are rounded to bfloat16.

    Args:
        as_pytorch: iterate in bfloat16 always. Otherwise float64 matrices are iterated in float64 and not rounded, and on the CPU
            others are iterated in float32, since most CPUs multiply bfloat16 many times slower.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, as_pytorch: bool) -> None:
        self._state = optimizer.state
        self._as_pytorch = as_pytorch

    def wire_dtype(self, matrices: Matrices) -> torch.dtype:
        """See :class:`.MatrixUpdate`."""
        if self._as_pytorch or matrices.updated is None:
            return torch.bfloat16
        is_double = matrices.updated.dtype is torch.float64
        return torch.float64 if is_double else torch.bfloat16

    def direction(self, matrices: Matrices, region: Region) -> torch.Tensor:
        """See :class:`.MatrixUpdate`."""
        parameter, group = matrices.updated, matrices.settings
        if parameter is None:
            raise AssertionError(f"this rank has no elements of {matrices.name}")
        gradient = parameter.grad
        state = self._state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter if gradient is None else gradient)
        momentum = matrices.part_of(state["momentum_buffer"], region)
        # Other parts of the parameter have a gradient: in one process this part's is zero.
        part = torch.zeros_like(momentum) if gradient is None else matrices.part_of(gradient, region)
        return enter(group, momentum, part).to(self.wire_dtype(matrices), copy=True)

    def transform(self, matrices: Matrices, whole: torch.Tensor) -> torch.Tensor:
        """See :class:`.MatrixUpdate`."""
        group, dtype = matrices.settings, whole.dtype
        is_slow = whole.device.type == "cpu" and dtype is torch.bfloat16 and not self._as_pytorch
        found = whole.float() if is_slow else whole
        return orthogonalized(found, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(dtype)

    def apply(self, matrices: Matrices, region: Region, update: torch.Tensor) -> None:
        """See :class:`.MatrixUpdate`."""
        parameter, group = matrices.updated, matrices.settings
        if parameter is None:
            raise AssertionError(f"this rank has no elements of {matrices.name}")
        move(group, matrices.part_of(parameter.detach(), region), update, matrices.rated or region.shape)

    def update_dtensor(self, matrices: Matrices) -> None:
        """Update the matrices of a DTensor, with all ranks of its mesh.

        Each rank gathers the whole direction, computes the whole update, and takes its part of it.
        """
        parameter: Any = matrices.updated
        group, state = matrices.settings, self._state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        here = enter(group, state["momentum_buffer"].to_local(), parameter.grad.to_local())
        whole = gathered(here.to(self.wire_dtype(matrices), copy=True), parameter)
        for region in matrices.regions:
            part = matrices.part_of(whole, region)
            part.copy_(self.transform(matrices, part.clone()))
        move(group, parameter.detach().to_local(), part_here(whole, parameter), matrices.shape[-2:])


def enter(group: Settings, momentum: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Let a gradient enter a momentum; return the direction, which may be the momentum itself."""
    momentum.lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def move(group: Settings, weight: torch.Tensor, update: torch.Tensor, shape: Sequence[int]) -> None:
    """Move elements of a matrix of a shape by the same elements of its update."""
    rate = float(group["lr"])
    weight.mul_(1 - rate * group["weight_decay"])
    weight.add_(update, alpha=-adjusted_rate(rate, group["adjust_lr_fn"], shape))


def update_matrices(
    update: MuonUpdate, groups: Sequence[Settings], whole: WholeMatrices | None, flag: str = ""
) -> None:
    """Update the matrices of an optimizer; with ``whole`` all ranks of a stage call this.

    Args:
        groups: the optimizer's.
        whole: None if this rank has all elements of its parameters.
        flag: name of the setting that says which groups have matrices; all do if it is empty.
    """

    def is_taken(group: Settings) -> bool:
        return bool(group[flag]) if flag else True

    if whole is not None:
        whole.update(update, whole.of(groups, is_taken))
        return
    for matrices in whole_here(groups, is_taken):
        if matrices.updated is None or matrices.updated.grad is None:
            continue
        if is_dtensor(matrices.updated):
            update.update_dtensor(matrices)
        else:
            update_here(update, matrices)


class Muon(ApexOptimizer):
    """Muon for hidden matrices (Jordan et al. 2024; Liu et al. 2025, "Muon is scalable for LLM training"), AdamW for the rest.

    The momentum of each matrix is replaced by the nearest orthogonal matrix, approximately, by Newton–Schulz iterations on the
    whole matrix, wherever its parts are. It updates matrices as ``torch.optim.Muon`` does, which iterates in bfloat16; but float64
    matrices are iterated in float64, and on the CPU others in float32. A parameter of three dimensions is a stack of matrices.

    Args:
        params: a model, whose hidden matrices are found by rule: tables, output heads, also tied ones, convolutions and vectors get
            AdamW. Or groups that say it themselves, by ``"use_muon": True`` or ``False``.
        lr: learning rate.
        weight_decay: factor of the decoupled decay.
        momentum: decay of the average of gradients.
        nesterov: look one step ahead.
        ns_coefficients: of the iteration's polynomial.
        eps: least norm by which a matrix is divided before the iterations.
        ns_steps: number of iterations.
        adjust_lr_fn: ``"original"`` (default) multiplies the rate by ``sqrt(max(1, rows / columns))``, ``"match_rms_adamw"`` by
            ``0.2 * sqrt(max(rows, columns))``, so that rate and decay of AdamW fit.
        betas: of AdamW.
        adamw_eps: of AdamW.
        adamw_lr: learning rate of AdamW; by default ``lr``. In groups it is ``lr``.
        adamw_weight_decay: of AdamW; by default ``weight_decay``. In groups it is ``weight_decay``.

    Raises:
        SMPUserError: it is not said which parameters are matrices; or a setting is out of its range.

    Example:
        >>> optimizer = smp.optimizers.Muon(module, lr=0.02, adamw_lr=1e-3)
        >>> module(inputs).sum().backward()
        >>> optimizer.step()
    """

    _whole: WholeMatrices | None = None

    def __init__(  # noqa: PLR0913 - the settings of PyTorch's Muon and of AdamW
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
    ) -> None:
        self._adamw_lr = lr if adamw_lr is None else adamw_lr
        self._adamw_weight_decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
        of_matrices: dict[str, Any] = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        of_others: dict[str, Any] = {"betas": tuple(betas), "adamw_eps": adamw_eps, "use_muon": None}
        _check({"lr": lr, "weight_decay": weight_decay, **of_matrices})
        groups: Iterable[Any] = params if not isinstance(params, nn.Module) else _by_rule(params)
        super().__init__(groups, lr=lr, weight_decay=weight_decay, **of_matrices, **of_others)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it says by ``"use_muon"`` whether its parameters are matrices.

        Raises:
            SMPUserError: it does not, or has parameters that are no matrices.
        """
        is_taken = param_group.get("use_muon")
        if is_taken is None:
            raise SMPUserError(
                "a group of smp.optimizers.Muon does not say whether its parameters are hidden matrices; embeddings, heads and "
                'vectors need AdamW: pass the model itself, smp.optimizers.Muon(model), or groups with "use_muon": True or False',
                code="SMP304",
            )
        if not is_taken:
            defaults = {"lr": self._adamw_lr, "weight_decay": self._adamw_weight_decay}
            param_group = {**defaults, **param_group}
        super().add_param_group(param_group)
        _check(self.param_groups[-1])
        for parameter in self.param_groups[-1]["params"] if is_taken else ():
            if parameter.dim() not in (2, 3) or parameter.is_complex():
                self.param_groups.pop()
                raise SMPUserError(
                    f"smp.optimizers.Muon got a parameter of shape {list(parameter.shape)} and {parameter.dtype} in a group with "
                    "use_muon; it updates real matrices, and stacks of them in three dimensions: put it into a group with "
                    '"use_muon": False',
                    code="SMP304",
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state, also one of PyTorch's Muon, whose groups have matrices only."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in {**self.defaults, "use_muon": True}.items():
                group.setdefault(name, value)

    def use_matrices(self, matrices: WholeMatrices | None) -> None:
        """Use ``matrices`` from now on, since parameters may be parts and other ranks have the rest."""
        self._whole = matrices

    def _update(self) -> None:
        update_matrices(MuonUpdate(self, as_pytorch=False), self.param_groups, self._whole, "use_muon")
        for group in self.param_groups:
            if not group["use_muon"]:
                update_by_adam(self, group, self._trained(group), eps="adamw_eps")


def _by_rule(model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of a model's hidden matrices and of its other parameters."""
    matrices, others = hidden_matrices(model)
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return [group for group in groups if group["params"]]


def _check(settings: Settings) -> None:
    """Refuse settings that are out of their range."""
    wrong = [f"{name} is {settings[name]}" for name in ("lr", "weight_decay", "momentum") if not settings[name] >= 0]
    if not 0 < settings["ns_steps"] < 100:
        wrong.append(f"ns_steps is {settings['ns_steps']}, not from 1 to 99")
    if len(settings["ns_coefficients"]) != 3:
        wrong.append(f"ns_coefficients has {len(settings['ns_coefficients'])} numbers, not 3")
    if settings["adjust_lr_fn"] not in ADJUSTMENTS:
        wrong.append(f"adjust_lr_fn is {settings['adjust_lr_fn']!r}, none of {', '.join(map(repr, ADJUSTMENTS))}")
    if wrong:
        raise SMPUserError(
            f"smp.optimizers.Muon: {'; '.join(wrong)}; use settings as torch.optim.Muon has", code="SMP304"
        )
