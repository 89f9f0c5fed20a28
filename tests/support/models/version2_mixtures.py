"""Small models with mixtures of experts, and the same with a router written from the formulas of each balancing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH, EXPERTS, CHOSEN, VOCABULARY = 12, 4, 2, 32


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class ListedMixture(nn.Module):
    """A router inside the mixture, and experts that are called one by one, those with tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> Any:
        flat = x.reshape(-1, WIDTH)
        logits = self.gate(flat)
        weights, chosen = torch.softmax(logits, -1).topk(CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        made = torch.zeros_like(flat)
        for at in chosen.unique().tolist():
            token, place = torch.where(chosen == at)
            made.index_add_(0, token, self.experts[at](flat[token]) * weights[token, place, None])
        return made.view_as(x), logits


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> Any:
        logits = x @ self.weight.T
        weights, chosen = torch.softmax(logits, -1).topk(CHOSEN, -1)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.inner = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.outer = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert int(chosen.max()) < self.num_experts
        made = torch.zeros_like(x)
        for at in chosen.unique().tolist():
            token, place = torch.where(chosen == at)
            rows = torch.tanh(x[token] @ self.inner[at].T) @ self.outer[at].T
            made = made.index_add(0, token, rows * weights[token, place, None])
        return made


class TabledMixture(nn.Module):
    """A router that chooses, and one module with the parameters of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Router(), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        _, weights, chosen = self.gate(flat)
        return self.experts(flat, chosen, weights).view_as(x)


class AllWeightsExperts(Experts):
    """Experts that take a weight of each token for every expert, as gpt-oss of Transformers 4."""

    def forward(self, x: torch.Tensor, indices: Any = None, scores: Any = None) -> torch.Tensor:
        assert scores.shape == (x.reshape(-1, WIDTH).shape[0], self.num_experts)
        flat = x.reshape(-1, WIDTH)
        return super().forward(flat, indices, scores.gather(1, indices)).view(x.shape[0], -1, WIDTH)


class AllWeightsMixture(nn.Module):
    """A mixture that names the arguments of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Router(), AllWeightsExperts()

    def forward(self, x: torch.Tensor) -> Any:
        _, weights, chosen = self.gate(x.reshape(-1, WIDTH))
        scores = weights.new_zeros(weights.shape[0], EXPERTS).scatter(1, chosen, weights)
        return self.experts(x, indices=chosen, scores=scores), scores


class NoisyMixture(ListedMixture):
    """A mixture that draws the experts of tokens while it trains."""

    def forward(self, x: torch.Tensor) -> Any:
        noise = torch.rand(x.shape[:-1], dtype=x.dtype) if self.training else torch.zeros((), dtype=x.dtype)
        return super().forward(x * (1 - 2 * noise.round())[..., None])


class Block(nn.Module):
    def __init__(self, mixture: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.mixture(self.norm(x))
        return x + (found[0] if isinstance(found, tuple) else found)


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, mixture: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(mixture) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_listed() -> Model:
    return Model(ListedMixture)


def make_tabled() -> Model:
    return Model(TabledMixture)


def make_with_all_weights() -> Model:
    return Model(AllWeightsMixture)


def make_noisy() -> Model:
    return Model(NoisyMixture)


# -- references --------------------------------------------------------------------------------------------------------


def balance(logits: torch.Tensor, k: int, way: str, aux: float, z: float) -> tuple[Any, Any, torch.Tensor]:
    """Return weights, choices and loss, straight from the formulas."""
    tokens, experts = logits.shape
    loss = z * (logits.exp().sum(1).log() ** 2).mean()
    ranked = logits.detach()
    if way == "sinkhorn":
        cost = ranked.exp()
        left, right = torch.ones(tokens, 1, dtype=cost.dtype), torch.ones(1, experts, dtype=cost.dtype)
        for _ in range(2000):
            left = 1 / (tokens * (cost * right).sum(1, keepdim=True))
            former, right = right, 1 / (experts * (cost * left).sum(0, keepdim=True))
            if torch.allclose(former, right, rtol=1e-14, atol=0):
                break
        ranked = left * cost * right
        assert torch.allclose(ranked.sum(0), torch.full((experts,), 1 / experts, dtype=cost.dtype))
        assert torch.allclose(ranked.sum(1), torch.full((tokens,), 1 / tokens, dtype=cost.dtype))
    if way == "balanced":
        chosen = torch.tensor([[(token * k + j) % experts for j in range(k)] for token in range(tokens)])
    else:
        chosen = ranked.argsort(dim=1, descending=True)[:, :k]
    kept = torch.stack([row[at] for row, at in zip(logits, chosen, strict=True)])
    everything = logits.exp() / logits.exp().sum(1, keepdim=True)
    if way == "sinkhorn":
        weights = torch.stack([row[at] for row, at in zip(everything, chosen, strict=True)])
        weights = weights if k > 1 else 1 / (1 + (-kept).exp())
    else:
        weights = kept.exp() / kept.exp().sum(1, keepdim=True)
    if way == "aux_loss":
        parts = [(chosen == at).double().mean() for at in range(experts)]
        loss = loss + aux * experts * sum(part * everything[:, at].mean() for at, part in enumerate(parts))
    return weights, chosen, loss


def run_expert(experts: nn.Module, at: int, x: torch.Tensor) -> torch.Tensor:
    """Run one expert on all tokens."""
    if isinstance(experts, nn.ModuleList):
        return experts[at](x)
    if isinstance(experts, Experts):
        return torch.tanh(x @ experts.inner[at].T) @ experts.outer[at].T
    gate, up = (x @ experts.gate_up_proj[at].T).chunk(2, -1)  # of Transformers 5
    return (nn.functional.silu(gate) * up) @ experts.down_proj[at].T


def use_reference(model: nn.Module, config: Any) -> list[torch.Tensor]:
    """Let a model's mixtures compute in one process by the formulas of a configuration; their losses come in a list."""
    losses: list[torch.Tensor] = []

    def forward(mixture: Any, x: torch.Tensor) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        logits = flat @ mixture.gate.weight.T
        weights, chosen, loss = balance(
            logits, CHOSEN, config.moe_load_balancing, config.moe_aux_loss_coeff, config.moe_z_loss_coeff
        )
        losses.append(loss)
        made = 0
        for at in range(EXPERTS):
            rows = run_expert(mixture.experts, at, flat)
            made = made + rows * (weights * (chosen == at)).sum(1, keepdim=True)
        made = made.view_as(x)
        return (made, logits) if type(mixture).__name__ == "MixtralSparseMoeBlock" and has_list else made

    mixtures = [module for module in model.modules() if hasattr(module, "gate") and hasattr(module, "experts")]
    has_list = any(isinstance(mixture.experts, nn.ModuleList) for mixture in mixtures)
    for mixture in mixtures:
        mixture.forward = forward.__get__(mixture)
    return losses
