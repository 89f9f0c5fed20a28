"""Jobs that change their degrees while they train."""

from __future__ import annotations

from typing import Any

import torch

from support.training.checkpoint_training import TOPOLOGIES, Training

#: Every setting that a topology may change, as it is without.
PLAIN: dict[str, Any] = {
    "ddp": True,
    "pipeline_parallel_degree": 1,
    "microbatches": 1,
    "tensor_parallel_degree": 1,
    "sharded_data_parallel_degree": 1,
    "context_parallel_degree": 1,
    "shard_optimizer_state": False,
    "prescaled_batch": False,
    "placement_strategy": "cluster",
}

#: Each with four ranks.
FOUR = "dp2 o2 tp2 pp2 pp4 tp4 s4 s2-dp2 pp2-o2 pp2-tp2 pp2-s2 tp2-s2".split()


def settings_of(name: str, **others: Any) -> dict[str, Any]:
    """All that differs between topologies."""
    given = dict(TOPOLOGIES[name][1])
    if "partitions" in given:
        given["pipeline_parallel_degree"] = given.pop("partitions")
    return {**PLAIN, **given, **others}


def every_pair(names: list[str]) -> list[str]:
    """A walk over all ordered pairs of different names, each once: an Eulerian circuit of the complete graph."""
    left = {name: [other for other in names if other != name] for name in names}
    walk, path = [], [names[0]]
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            walk.append(path.pop())
    return walk[::-1]


def train_through(
    names: list[str], hop: int, dtype: str = "float32", others: dict[str, Any] | None = None
) -> tuple[list[float], list[tuple[str, str, int, int, float]]]:
    """Losses of a job that goes through topologies, ``hop`` steps in each; and of each change the bytes and their bound."""
    import smdistributed.modelparallel.torch as smp

    torch.set_default_dtype(getattr(torch, dtype))
    try:
        run = Training(divided=True)
        losses: list[float] = []
        changes = []
        for number, name in enumerate(names):
            if number:
                had = elements_here(run)
                done = smp.reshape(settings_of(name, **(others or {})))
            losses += run.train(number * hop, (number + 1) * hop)
            if number:
                changes.append(
                    (names[number - 1], name, done.received_bytes, missing(had, elements_here(run)), done.seconds)
                )
    finally:
        torch.set_default_dtype(torch.float32)
    return losses, changes


def train_alone(steps: int, dtype: str = "float32") -> list[float]:
    """The losses of one process."""
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return Training(divided=True).train(0, steps)
    finally:
        torch.set_default_dtype(torch.float32)


def elements_here(run: Training) -> dict[tuple[str, str], tuple[torch.Tensor, int]]:
    """Which elements of every tensor this rank has, as a mask of the whole, and the bytes of one; found by brute force."""
    from smp_runtime.checkpoint.live_state import live_buffers, live_masters, live_weights, updated_parameters

    found: dict[tuple[str, str], tuple[torch.Tensor, int]] = {}

    def note(kind: str, name: str, region: Any, size: int) -> None:
        places = torch.arange(max(1, torch.Size(region.shape).numel())).view(region.shape)
        mine = region.cut(places).reshape(-1)[region.first : region.last]
        mask = torch.zeros(places.numel(), dtype=torch.bool)
        mask[mine] = True
        found[kind, name] = mask, size

    exact = {holding.name for holding in live_masters(run.model)}
    for kind, holdings in (
        ("weight", live_weights(run.model)),
        ("master", live_masters(run.model)),
        ("buffer", live_buffers(run.model)),
    ):
        for h in holdings:
            note(kind, h.name, h.region, h.tensor.element_size())
    for entry in updated_parameters(run.model, run.optimizer):
        state = run.optimizer.state.get(entry.updated, {}) if entry.updated is not None else {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and entry.name in (exact or {entry.name}):
                note(key, entry.name, entry.region, value.element_size())
    return found


def missing(
    had: dict[tuple[str, str], tuple[torch.Tensor, int]], has: dict[tuple[str, str], tuple[torch.Tensor, int]]
) -> int:
    """Bytes that a rank must have got: of elements that it has and had not; weights follow from float32 weights beside them."""
    total = 0
    for (kind, name), (mask, size) in has.items():
        new = mask.clone()
        if (kind, name) in had:
            new &= ~had[kind, name][0]
        if kind == "weight" and ("master", name) in has:
            new &= ~has["master", name][0]
        total += int(new.sum()) * size
    return total
