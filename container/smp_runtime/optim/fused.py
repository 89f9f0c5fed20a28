"""``smp.optimizers``: the optimizers that scripts know from apex, in plain PyTorch operations.

LAMB and NovoGrad look at the norm of each whole parameter and, in LAMB, of the whole gradient. Where ranks hold parts of
parameters or of the model, ``use_norms`` gives them the norms over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from smp_runtime.errors import SMPUserError
from smp_runtime.optim.fused_kernels import are_fusible, counters_beside
from smp_runtime.optim.gradient_norms import as_real, squared_norms

#: Steps after which averages of any decay count as they are.
_MANY = 1e12

#: Pairs of a parameter and a tensor of its shape.
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Norms(Protocol):
    """Squared norms of whole tensors, from the parts on several ranks; all ranks with a part call it together."""

    def squares(self, tensors: Pairs, known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the squared norm of each whole tensor; ``known`` are all parameters of the optimizer."""
        ...

    def total_square(self, tensors: Pairs, known: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the squared norm of all whole tensors together, including other stages' tensors."""
        ...


@runtime_checkable
class TakesNorms(Protocol):
    """An optimizer that is right about parts of parameters once it is given the norms of the whole ones."""

    def use_norms(self, norms: Norms) -> None:
        """Use ``norms`` from now on, since parameters may be parts and other ranks have the rest."""


class ApexOptimizer(torch.optim.Optimizer):
    """The common part of these optimizers; ``settings`` are those of a group, by name.

    Attributes:
        set_grad_none: the default of :meth:`zero_grad`: None for gradients, or zeros.
    """

    def __init__(self, params: Iterable[Any], *, set_grad_none: bool = True, **settings: Any) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, settings)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError

    def _trained(self, group: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the group's parameters that have a gradient, with their gradients."""
        return [(parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None]


class NormedOptimizer(ApexOptimizer):
    """Knows the norms of whole parameters, whatever part of them is here."""

    _norms: Norms | None = None

    def use_norms(self, norms: Norms) -> None:
        """Use ``norms`` from now on, since parameters may be parts and other ranks have the rest."""
        self._norms = norms

    def _squares(self, tensors: Pairs) -> list[torch.Tensor]:
        """Return, for each tensor, the squared norm of the whole tensor that it is a part of.

        Args:
            tensors: pairs of a parameter and the tensor of its shape to measure.
        """
        if self._norms is None:
            return squared_norms([tensor for _, tensor in tensors])
        return self._norms.squares(tensors, self._known())

    def _known(self) -> list[torch.Tensor]:
        known: list[torch.Tensor] = []
        for group in self.param_groups:
            known += group["params"]
        return known


class FusedAdam(ApexOptimizer):
    """Adam, with decoupled weight decay by default (``adam_w_mode``).

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: divide the averages by ``1 - beta**step``.
        betas: decay of the averages of gradient and squared gradient.
        eps: added to the denominator.
        adam_w_mode: False adds the decay to the gradient instead.
        weight_decay: factor of the decay.
        amsgrad: not supported, as in apex.
        set_grad_none: False lets ``zero_grad()`` write zeros in place of removing gradients.

    Raises:
        SMPUserError: ``amsgrad``.

    Example:
        >>> optimizer = smp.optimizers.FusedAdam(module.parameters(), lr=1e-3)  # or of smp.DistributedOptimizer's model
        >>> module(inputs).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise SMPUserError(
                "FusedAdam has no AMSGrad variant; use torch.optim.AdamW(amsgrad=True) instead", code="SMP304"
            )
        common = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, set_grad_none=set_grad_none, **common)
        self.adam_w_mode = adam_w_mode

    def _update(self) -> None:
        update = adamw if self.adam_w_mode else adam
        for group in self.param_groups:
            update_by_adam(self, group, self._trained(group), update)


def update_by_adam(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    trained: Pairs,
    update: Callable[..., None] = adamw,
    eps: str = "eps",
) -> None:
    """Update parameters by PyTorch's Adam or AdamW, with the settings of their group and counters that are plain numbers.

    Args:
        trained: parameters with their gradients.
        eps: name of that setting.
    """
    if not trained:
        return
    for parameter, _ in trained:
        state = optimizer.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
    states = [optimizer.state[parameter] for parameter, _ in trained]
    parameters, gradients = (list(each) for each in zip(*trained, strict=True))
    averages, squared = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
    # PyTorch's function counts them up itself. After so many steps there is nothing to correct.
    before = [float(state["step"] if group.get("bias_correction", True) else _MANY) for state in states]
    is_fused = are_fusible([*parameters, *gradients, *averages, *squared])
    # Only the fused form reads them on the parameters' device.
    on_host = list(torch.tensor(before, dtype=torch.float32, device="cpu").unbind())
    update(
        *(parameters, gradients, averages, squared, []),
        counters_beside(parameters, before) if is_fused else on_host,
        fused=True if is_fused else None,
        has_complex=any(parameter.is_complex() for parameter in parameters),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group[eps],
        maximize=False,
    )
    for state in states:
        state["step"] += 1


class FusedLAMB(NormedOptimizer):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning"): Adam with a step scaled per parameter.

    The step of each parameter is scaled by the ratio of the parameter's norm to the norm of its update.

    Args:
        params, lr, bias_correction, betas, eps, weight_decay, amsgrad, set_grad_none: as in :class:`FusedAdam`.
        adam_w_mode: False adds the decay to the gradient instead of the update.
        grad_averaging: weigh the gradient by ``1 - beta_1`` in its average.
        max_grad_norm: the whole gradient is scaled down to this norm first; 0 leaves it.
        use_nvlamb: scale parameters without weight decay too.

    Raises:
        SMPUserError: ``amsgrad``.

    Example:
        >>> optimizer = smp.optimizers.FusedLAMB(module.parameters(), lr=1e-3)
        >>> module(inputs).sum().backward()
        >>> optimizer.step()
    """

    def __init__(  # noqa: PLR0913 - apex's signature
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise SMPUserError("FusedLAMB has no AMSGrad variant; leave amsgrad at False", code="SMP304")
        settings = {"weight_decay": weight_decay, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm}
        common = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, set_grad_none=set_grad_none, **common, **settings)
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb

    def _update(self) -> None:
        everything = [pair for group in self.param_groups for pair in self._trained(group)]
        total = self._total_norm(everything)
        updates: list[tuple[torch.Tensor, torch.Tensor]] = []
        settings = []
        for group in self.param_groups:
            beta_1, beta_2 = group["betas"]
            limit = group["max_grad_norm"]
            shrink = torch.clamp(total / limit, min=1.0) if limit and limit > 0 and total is not None else None
            for parameter, gradient in self._trained(group):
                state = self.state[parameter]
                if shrink is not None:
                    gradient = gradient / shrink
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                state["step"] += 1
                decay, values, gradient = group["weight_decay"], as_real(parameter), as_real(gradient)
                average, square = as_real(state["exp_avg"]), as_real(state["exp_avg_sq"])
                if decay and not self.adam_w_mode:
                    gradient = gradient.add(values, alpha=decay)
                weight = 1 - beta_1 if group["grad_averaging"] else 1.0
                average.mul_(beta_1).add_(gradient, alpha=weight)
                square.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
                first, second = bias_corrections(group, state["step"], beta_1, beta_2)
                update = (average / first) / ((square / second).sqrt_().add_(group["eps"]))
                if decay and self.adam_w_mode:
                    update.add_(values, alpha=decay)
                updates.append((parameter, update))
                settings.append((group["lr"], bool(decay) or self.use_nvlamb))
        sizes = self._squares([(p, p) for p, _ in updates])
        lengths = self._squares(updates)
        for (parameter, update), (lr, scaled), size, length in zip(updates, settings, sizes, lengths, strict=True):
            ratio = (
                torch.where((size > 0) & (length > 0), (size / length).sqrt(), torch.ones_like(size)) if scaled else 1.0
            )
            as_real(parameter).sub_(update * (lr * ratio))

    def _total_norm(self, pairs: Pairs) -> torch.Tensor | None:
        if self._norms is None:
            return torch.stack([square.double() for square in self._squares(pairs)]).sum().sqrt() if pairs else None
        # Every rank takes part in this sum over ranks. One without gradients must too, as another rank may have some.
        return self._norms.total_square(pairs, self._known()).sqrt()


class FusedNovoGrad(NormedOptimizer):
    """NovoGrad (Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments").

    The second moment is one number per parameter: an average of the gradient's norm.

    Args:
        params, lr, bias_correction, eps, weight_decay, amsgrad, set_grad_none: as in :class:`FusedAdam`.
        betas: decay of the averages of gradient and norm.
        reg_inside_moment: add the decay before the average instead of after it.
        grad_averaging: weigh the gradient by ``1 - beta_1`` in its average.
        norm_type: 2 only.
        init_zero: start the norm's average at 0 instead of at the first norm.

    Raises:
        SMPUserError: ``amsgrad``, or another ``norm_type``.

    Example:
        >>> optimizer = smp.optimizers.FusedNovoGrad(module.parameters(), lr=1e-3)
        >>> module(inputs).sum().backward()
        >>> optimizer.step()
    """

    def __init__(  # noqa: PLR0913 - apex's signature
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise SMPUserError("FusedNovoGrad has no AMSGrad variant; leave amsgrad at False", code="SMP304")
        if norm_type != 2:
            raise SMPUserError(
                f"norm_type is {norm_type}; FusedNovoGrad measures gradients in the L2 norm: use 2", code="SMP304"
            )
        settings = {"weight_decay": weight_decay, "grad_averaging": grad_averaging}
        common = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, set_grad_none=set_grad_none, **common, **settings)
        self.reg_inside_moment = reg_inside_moment
        self.init_zero = init_zero

    def _update(self) -> None:
        pairs = [pair for group in self.param_groups for pair in self._trained(group)]
        squares = iter(self._squares(pairs))
        for group in self.param_groups:
            beta_1, beta_2 = group["betas"]
            for parameter, gradient in self._trained(group):
                square, state = next(squares), self.state[parameter]
                if not state:
                    first_norm = torch.zeros_like(square) if self.init_zero else square
                    state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=first_norm.clone())
                state["step"] += 1
                if state["step"] > 1 or self.init_zero:
                    state["exp_avg_sq"] = state["exp_avg_sq"] * beta_2 + square * (1 - beta_2)
                first, second = bias_corrections(group, state["step"], beta_1, beta_2)
                denominator = (state["exp_avg_sq"] / second).sqrt() + group["eps"]
                direction = gradient / denominator
                if self.reg_inside_moment:
                    direction.add_(parameter, alpha=group["weight_decay"])
                weight = 1 - beta_1 if group["grad_averaging"] else 1.0
                state["exp_avg"].mul_(beta_1).add_(direction, alpha=weight)
                update = state["exp_avg"] / first
                if not self.reg_inside_moment:
                    update.add_(parameter, alpha=group["weight_decay"])
                parameter.sub_(update, alpha=group["lr"])


#: The other spelling that scripts use.
FusedLamb = FusedLAMB


def bias_corrections(group: dict[str, Any], step: int, beta_1: float, beta_2: float) -> tuple[float, float]:
    """Return the divisors for the averages of gradient and squared gradient after ``step`` steps."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    return 1 - beta_1**step, 1 - beta_2**step
