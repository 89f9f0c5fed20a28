"""Trainings whose expert parallel ranks share the experts of mixtures out, beside a copy in one process."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.training import version2_checkpoints as checkpoints
from support.training.version2_checkpoints import Training

STEPS, BATCH, LENGTH = 3, 2, 10
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")


def draw(step: int, rank: int, vocabulary: int) -> torch.Tensor:
    """Return a rank's tokens in a step."""
    seed = 1000 * step + rank
    return torch.randint(0, vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def compute_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next tokens."""
    # A cache would be filled twice if blocks are recomputed.
    found = model(ids, use_cache=False) if hasattr(model, "config") else model(ids)
    logits = found if isinstance(found, torch.Tensor) else found.logits
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def train_whole(model: nn.Module, ranks: int, vocabulary: int, losses: list[torch.Tensor]) -> list[float]:
    """Train in one process; each rank's batch is routed by itself, as on the ranks. Return the norms of gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            losses.clear()
            loss = compute_loss(model, draw(step, rank, vocabulary))
            ((loss + sum(losses)) / ranks).backward()
        for parameter in model.parameters():  # FSDP updates experts without tokens too, plain or not
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return norms


def wrap(model: nn.Module, kind: type[nn.Module] | None = None, **given: Any) -> Any:
    """Wrap a model as scripts do, each block by itself; without ``kind`` blocks are known by the original's class."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    from smp_version2.layer_classes import TransformerLayer

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={kind or TransformerLayer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, **given)


def train(
    config: dict[str, Any], make: Any, settings: dict[str, Any] | None, vocabulary: int, recompute: bool = False
) -> dict[str, Any]:
    """Train on this rank, and compare parameters, norms and the full state dict with those of one process."""
    import torch.sagemaker as tsm

    import torch_sagemaker_finder  # noqa: F401
    from smp_version2.clipping import clip_grad_norm_
    from smp_version2.moe.config import MoEConfig
    from support.models.version2_mixtures import use_reference

    torch.manual_seed(0)
    tsm.init(config)
    model = make().double()
    whole = copy.deepcopy(model)
    moe = None if settings is None else MoEConfig(**settings)
    losses = use_reference(whole, moe) if moe is not None else []
    model = tsm.transform(model, config=moe)
    names = set(model.state_dict())
    wrapped = wrap(model)
    if recompute:
        from support.training.version2_training import _checkpoint

        _checkpoint(wrapped)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    norms = []
    replicas, mine = tsm.state.world_size // tsm.state.tp_size, tsm.state.rank // tsm.state.tp_size
    for step in range(STEPS):
        optimizer.zero_grad()
        compute_loss(wrapped, draw(step, mine, vocabulary)).backward()
        norms.append(float(clip_grad_norm_(wrapped, 0.5)))
        optimizer.step()
    wanted_norms = train_whole(whole, replicas, vocabulary, losses)
    wanted = {name: value.detach() for name, value in whole.state_dict().items()}
    saved = full_state(wrapped)
    return {
        "apart": {name: distance(value, wanted[name]) for name, value in saved.items()},
        "norms": max(abs(one / other - 1) for one, other in zip(norms, wanted_norms, strict=True)),
        "missing": sorted(wanted.keys() ^ saved.keys()),
        "held": sum(parameter.numel() for parameter in wrapped.parameters()),
        "whole": sum(parameter.numel() for parameter in whole.parameters()),
        "names": names,
        "places": (tsm.state.ep_rank, tsm.state.ep_size, tsm.state.ranker.get_rep_rank(tsm.state.rank)),
    }


def train_by_function(config: dict[str, Any], make: Any, vocabulary: int) -> dict[str, Any]:
    """Train a model that ``fully_shard`` has sharded, and compare the whole state with that of one process."""
    from torch.distributed.fsdp import fully_shard

    from smp_version2.clipping import clip_grad_norm_
    from smp_version2.layer_classes import TransformerLayer
    from support.training.version2_whole import gather_state

    with checkpoints.joined(config) as tsm:
        torch.manual_seed(0)
        model = make().double()
        whole = copy.deepcopy(model)
        model = tsm.transform(model)
        for block in [module for module in model.modules() if isinstance(module, TransformerLayer)]:
            fully_shard(block)
        fully_shard(model)
        optimizer, norms = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        replicas, mine = tsm.state.world_size // tsm.state.tp_size, tsm.state.rank // tsm.state.tp_size
        for step in range(STEPS):
            optimizer.zero_grad()
            compute_loss(model, draw(step, mine, vocabulary)).backward()
            norms.append(float(clip_grad_norm_(model, 0.5)))
            optimizer.step()
        wanted_norms = train_whole(whole, replicas, vocabulary, [])
        wanted, found = whole.state_dict(), gather_state(model)
        return {
            "apart": {name: distance(found[name], value) for name, value in wanted.items()},
            "norms": max(abs(one / other - 1) for one, other in zip(norms, wanted_norms, strict=True)),
            "names": found.keys() ^ wanted.keys(),
            "held": sum(parameter.to_local().numel() for parameter in model.parameters()),
            "whole": sum(parameter.numel() for parameter in whole.parameters()),
        }


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full state dict, on every rank."""
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    kind, config = StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        return {name: value.clone() for name, value in model.state_dict().items()}


def distance(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the greatest difference, relative to the greatest value."""
    return float((mine - wanted).abs().max() / wanted.abs().max())


class ExpertTraining(Training):
    """A training of a small model with mixtures, which saves in a folder for each expert parallel rank as scripts do."""

    def __init__(self, seed: int, make: Any, moe: dict[str, Any] | None = None) -> None:
        import torch.sagemaker as tsm

        from smp_version2.moe.config import MoEConfig

        torch.manual_seed(seed)
        config = None if moe is None else MoEConfig(**moe)
        self.model = wrap(tsm.transform(make().double(), config=config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.steps = 0

    def train(self, until: int) -> None:
        import torch.sagemaker as tsm

        while self.steps < until:
            self.optimizer.zero_grad()
            compute_loss(self.model, draw(self.steps, tsm.state.rank, 32)).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.steps += 1


def resume(config: dict[str, Any], make: Any, way: str, root: Path) -> list[str]:
    """Train, save on the way, and resume in a new training; return the names of values that differ."""
    with checkpoints.joined(config) as tsm:
        folder = root / f"ep{tsm.state.ep_size}-{tsm.state.ep_rank}"
        queue = tsm_queue()
        first = ExpertTraining(0, make)
        first.train(2)
        if way == "local":
            checkpoints.save_local(first, root, queue)
            queue.maybe_finalize_async_calls(blocking=True)
        elif way == "sharded":
            checkpoints.save(first, folder)
        whole = full_state(first.model)
        torch.distributed.barrier()
        second = ExpertTraining(1, make)
        if way == "local":
            checkpoints.load_local(second, root)
        elif way == "sharded":
            checkpoints.load(second, folder)
        else:
            load_full(second.model, whole)
        found = full_state(second.model)
        differing = [name for name in whole if not torch.equal(whole[name], found[name])]
        if way != "full":
            first.train(4)
            second.train(4)
            wanted, found = full_state(first.model), full_state(second.model)
            differing += [f"{name} later" for name in wanted if not torch.equal(wanted[name], found[name])]
        return differing


#: By expert parallel degree of four ranks, the other degrees.
DEGREES: dict[int, dict[str, int]] = {
    1: {"hybrid_shard_degree": 2},
    2: {"hybrid_shard_degree": 2, "expert_parallel_degree": 2},
    4: {"hybrid_shard_degree": 1, "expert_parallel_degree": 4},
}


def resume_at_other_degrees(make: Any, degrees: tuple[int, ...], root: Path) -> dict[str, float]:
    """Train, and save and resume at one expert parallel degree after the other; return how far state and later training differ."""
    apart: dict[str, float] = {}
    before: dict[str, torch.Tensor] = {}
    whole: dict[str, torch.Tensor] = {}
    for place, degree in enumerate(degrees):
        with checkpoints.joined(DEGREES[degree]) as tsm:
            name = f"ep{tsm.state.ep_size}-{tsm.state.ep_rank}"
            training = ExpertTraining(place, make)
            if place:
                checkpoints.load(training, root / str(place - 1) / name)
                found = full_state(training.model)
                apart[f"to {degree}"] = max(distance(found[key], value) for key, value in before.items())
            training.train(2 * place + 2)
            checkpoints.save(training, root / str(place) / name)
            before = full_state(training.model)
            if not place:
                training.train(2 * len(degrees))
                whole = full_state(training.model)
            torch.distributed.barrier()
    apart["later"] = max(distance(before[key], value) for key, value in whole.items())
    return apart


def tsm_queue() -> Any:
    """Return a queue of saves."""
    from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue

    return AsyncCallsQueue()


def load_full(model: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """Load a full state dict."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(whole)


def draw_experts(make: Any) -> float:
    """Return how far apart the results of a mixture that draws numbers are from those of one process with the same numbers."""
    with checkpoints.joined({"expert_parallel_degree": 2}) as tsm:
        torch.manual_seed(0)
        whole = make().double()
        model = wrap(tsm.transform(copy.deepcopy(whole)))
        found = []
        for each in (model, whole):
            torch.manual_seed(10 + tsm.state.rank)
            found.append(each(draw(0, tsm.state.rank, 32)))
        return distance(*found)


def shuffle_once(make: Any, way: str) -> dict[str, Any]:
    """Train with and without the token shuffle; return how far apart results and parameters are."""
    with checkpoints.joined({"expert_parallel_degree": 2}) as tsm:
        plain = {"moe_load_balancing": way, "moe_z_loss_coeff": 0.01}
        first, second = ExpertTraining(0, make, plain), ExpertTraining(0, make, {**plain, "global_token_shuffle": True})
        seen: list[list[Any]] = [[], []]
        for training, rows in zip((first, second), seen, strict=True):
            gate = next(part for name, part in training.model.named_modules() if name.endswith("gate"))
            gate.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(args[0].reshape(-1, 12).detach()))
        ids = draw(7, tsm.state.rank, 32)
        one, two = first.model(ids), second.model(ids)
        own = (seen[1][0][:, None] - seen[0][0]).abs().amax(-1).amin(-1) < 1e-12
        first.train(3)
        second.train(3)
        wanted, found = full_state(first.model), full_state(second.model)
        return {
            "results": distance(two.detach(), one.detach()),
            "apart": max(distance(found[name], value) for name, value in wanted.items()),
            "own": float(own.double().mean()),
        }
