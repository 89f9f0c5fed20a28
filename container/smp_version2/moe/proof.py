"""Tries a mixture of experts on a few tokens, before and after it is changed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smp_runtime.errors import SMPUserError

#: Tokens of the trial.
_TOKENS = 8
#: How far results may be apart, relative to the greatest.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_ROUGH = 5e-2


@dataclass
class MixtureTrial:
    """What a mixture computed before it was changed.

    Attributes:
        tokens: the input, ``[1, tokens, features]``.
        result: what the mixture returned.
        routed: what its router returned.
        calls: choices of all tokens, as the router or the calls of experts show them.
        drawn: parameters for the trial of a mixture on the meta device, which has none.
    """

    tokens: torch.Tensor
    result: Any
    routed: Any
    calls: int
    drawn: dict[str, torch.Tensor]

    @classmethod
    def of(cls, mixture: nn.Module, router: str, experts: str) -> MixtureTrial:
        """Run a mixture."""
        weight = next(p for p in mixture.get_submodule(router).parameters(recurse=False) if p.dim() == 2)
        generator = torch.Generator().manual_seed(0)
        drawn: dict[str, torch.Tensor] = {}
        if weight.is_meta:
            drawn = {name: _draw(tensor, generator) for name, tensor in mixture.state_dict().items()}
        made = torch.randn(1, _TOKENS, weight.shape[1], generator=generator, dtype=torch.float64)
        tokens = made.to(weight.dtype).to("cpu" if drawn else weight.device)
        trial = cls(tokens, None, None, 0, drawn)
        seen: list[Any] = []
        calls: list[int] = []
        tried = trial.at_work(mixture)
        handles = [tried.get_submodule(router).register_forward_hook(lambda _, args, result: seen.append(result))]
        for expert in tried.get_submodule(experts).children():
            handles.append(expert.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[0])))
        trial.result = _run(tried, tokens)
        for handle in handles:
            handle.remove()
        trial.routed, trial.calls = seen[0] if seen else None, sum(calls)
        return trial

    def at_work(self, mixture: nn.Module) -> nn.Module:
        """Return the mixture, or a copy with values if it is on the meta device."""
        if not self.drawn:
            return mixture
        made = copy.deepcopy(mixture).to_empty(device="cpu")
        made.load_state_dict(self.drawn)
        return made

    @property
    def choices(self) -> int:
        """Return the number of experts of a token, of listed ones."""
        return self.calls // _TOKENS

    def returns_logits(self, experts: int) -> bool:
        """Return whether the mixture returns the router's results behind its own.

        Raises:
            SMPUserError: it returns something else.
        """
        if isinstance(self.result, torch.Tensor):
            return False
        if isinstance(self.result, tuple) and [_shape(each) for each in self.result[1:]] == [(_TOKENS, experts)]:
            return True
        raise SMPUserError(
            "a mixture returns neither its results nor these and its router's, so MoEConfig cannot take its place: pass "
            "MoEConfig(smp_moe=False), which keeps the model's routing",
            code="SMP303",
        )

    def router_chooses(self, experts: int) -> bool:
        """Return whether the router returns its results, weights and choices."""
        found = self.routed
        if not isinstance(found, tuple) or len(found) < 3:
            return False
        logits, weights, choices = found[:3]
        chosen = _shape(choices)
        return _shape(logits) == (_TOKENS, experts) and _shape(weights) == chosen and chosen[:1] == (_TOKENS,)

    def compare(self, mixture: nn.Module, name: str) -> None:
        """Run the changed mixture, and compare.

        Raises:
            SMPUserError: it returns something else.
        """
        found = _first(_run(self.at_work(mixture), self.tokens))
        wanted = _first(self.result)
        # If all results are 0, this avoids 0 / 0, which no tolerance would admit.
        apart = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
        if not apart <= _TOLERANCES.get(wanted.dtype, _ROUGH):
            raise SMPUserError(
                f"{name} computes something else when its experts are called one by one ({apart:.1e} apart, relative to the "
                "greatest result), so they cannot be shared out: set expert_parallel_degree to 1",
                code="SMP303",
            )


def _run(mixture: nn.Module, tokens: torch.Tensor) -> Any:
    trains = [part for part in mixture.modules() if part.training]
    mixture.eval()
    try:
        with torch.no_grad():
            return mixture(tokens.clone())
    finally:
        for part in trains:
            part.training = True


def _draw(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    return made.normal_(0, 0.1, generator=generator) if made.is_floating_point() else made.zero_()


def _first(result: Any) -> torch.Tensor:
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
