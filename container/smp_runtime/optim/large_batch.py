"""LARS and LANS: optimizers for large batches, which scale the step of each whole parameter by its norms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from smp_runtime.errors import SMPUserError
from smp_runtime.optim.fused import NormedOptimizer, bias_corrections
from smp_runtime.optim.gradient_norms import as_real


class FusedLARS(NormedOptimizer):
    """LARS (You et al., "Large Batch Training of Convolutional Networks"): momentum with a rate per parameter.

    The gradient with its decay is multiplied by ``trust_coefficient * |w| / (|g| + weight_decay * |w|)`` before it enters the
    momentum. Biases and norms are usually left out: give them a group with ``trust_coefficient=0``.

    Args:
        params: parameters or groups.
        lr: learning rate, by which the momentum is multiplied.
        momentum: decay of the sum of gradients; 0 keeps none.
        weight_decay: factor of the parameter that is added to its gradient.
        trust_coefficient: of the rate; 0 leaves the gradient as it is.
        eps: added to the denominator of the rate.
        nesterov: look one step ahead, as ``torch.optim.SGD`` does.

    Raises:
        SMPUserError: ``nesterov`` without momentum.

    Example:
        >>> optimizer = smp.optimizers.FusedLARS(module.parameters(), lr=0.1)
        >>> module(inputs).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
    ) -> None:
        if nesterov and not momentum:
            raise SMPUserError(
                "nesterov is true and momentum is 0, so there is nothing to look ahead with; give a momentum such as 0.9, or leave "
                "nesterov at False",
                code="SMP304",
            )
        settings: dict[str, Any] = {"weight_decay": weight_decay, "trust_coefficient": trust_coefficient, "eps": eps}
        super().__init__(params, lr=lr, momentum=momentum, nesterov=nesterov, **settings)

    def _update(self) -> None:
        trained = [(group, pair) for group in self.param_groups for pair in self._trained(group)]
        # The norms of all parameters at once: the ranks exchange them in one message each.
        sizes = self._squares([(parameter, parameter) for _, (parameter, _) in trained])
        lengths = self._squares([pair for _, pair in trained])
        for (group, (parameter, gradient)), size, length in zip(trained, sizes, lengths, strict=True):
            decay, trust = group["weight_decay"], group["trust_coefficient"]
            update = gradient.add(parameter, alpha=decay) if decay else gradient.clone()
            if trust:
                weight = size.sqrt()
                rate = trust * weight / (length.sqrt() + decay * weight + group["eps"])
                # Decided on the device: the host would wait for it at each parameter.
                has_lengths = (size > 0) & (length > 0)
                update.mul_(torch.where(has_lengths, rate, torch.ones_like(rate)))
            if group["momentum"]:
                update = self._with_momentum(group, parameter, update)
            parameter.sub_(update, alpha=group["lr"])

    def _with_momentum(self, group: dict[str, Any], parameter: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Add an update to the parameter's momentum, and return the update to apply."""
        momentum = group["momentum"]
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        kept: torch.Tensor = state["momentum_buffer"].mul_(momentum).add_(update)
        return update.add_(kept, alpha=momentum) if group["nesterov"] else kept


class FusedLANS(NormedOptimizer):
    """LANS (Zheng et al., "Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes").

    LAMB with gradients that are divided by their norm, each parameter's alone, and with a look ahead: the step is the sum of
    one along the average and one along the gradient, each as long as the parameter.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: divide the averages by ``1 - beta**step``.
        betas: decay of the averages of gradient and squared gradient; the first also weighs the two directions.
        eps: added to the denominator.
        weight_decay: factor of the parameter that is added to both directions.

    Example:
        >>> optimizer = smp.optimizers.FusedLANS(module.parameters(), lr=1e-3)
        >>> module(inputs).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        settings: dict[str, Any] = {"bias_correction": bias_correction, "weight_decay": weight_decay}
        super().__init__(params, lr=lr, betas=betas, eps=eps, **settings)

    def _update(self) -> None:
        trained = [(group, pair) for group in self.param_groups for pair in self._trained(group)]
        lengths = self._squares([pair for _, pair in trained])
        averages, fresh = [], []
        for (group, (parameter, gradient)), length in zip(trained, lengths, strict=True):
            beta_1, beta_2 = group["betas"]
            # A gradient of zeros stays one. Decided on the device, for which the host does not wait.
            gradient = gradient / torch.where(length > 0, length.sqrt(), torch.ones_like(length))
            state = self.state[parameter]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            state["step"] += 1
            average, square = as_real(state["exp_avg"]), as_real(state["exp_avg_sq"])
            values, gradient = as_real(parameter), as_real(gradient)
            average.lerp_(gradient, 1 - beta_1)
            square.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
            first, second = bias_corrections(group, state["step"], beta_1, beta_2)
            denominator = (square / second).sqrt_().add_(group["eps"])
            decay = group["weight_decay"]
            averages.append((parameter, (average / first).div_(denominator).add_(values, alpha=decay)))
            fresh.append((parameter, gradient.div_(denominator).add_(values, alpha=decay)))
        sizes = self._squares([(parameter, parameter) for parameter, _ in averages])
        along_average, along_gradient = self._squares(averages), self._squares(fresh)
        for at, (group, (parameter, _)) in enumerate(trained):
            lr, beta_1 = group["lr"], group["betas"][0]
            values = as_real(parameter)
            values.sub_(averages[at][1] * (lr * beta_1 * _ratio(sizes[at], along_average[at])))
            values.sub_(fresh[at][1] * (lr * (1 - beta_1) * _ratio(sizes[at], along_gradient[at])))


def _ratio(size: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Return the ratio of two norms, given squared; 1 where one of them is 0."""
    return torch.where((size > 0) & (length > 0), (size / length).sqrt(), torch.ones_like(size))
