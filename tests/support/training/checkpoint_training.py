"""What the tests of checkpoints share: a model for every topology, the topologies, and one training loop."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from support.models.models import token_batches
from support.training.rank_training import training_step, updates

VOCABULARY, HIDDEN, SEQ, BATCH = 12, 8, 5, 16

#: Clipping changes nothing, everything is sharded.
SHARDED = {"ddp": True, "sdp_param_persistence_threshold": 20, "sdp_gradient_clipping": 1e9}
_STATE = {"ddp": True, "shard_optimizer_state": True}

#: Number of processes and settings. ``s`` sharded data parallel degree, ``o`` sharded optimizer state.
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {"ddp": True, "microbatches": 2}),
    "o2": (2, _STATE),
    "pp2": (2, {"partitions": 2, "microbatches": 4}),
    "tp2": (2, {"ddp": True, "tensor_parallel_degree": 2}),
    "s2": (2, {**SHARDED, "sharded_data_parallel_degree": 2}),
    "s4": (4, {**SHARDED, "sharded_data_parallel_degree": 4}),
    "s2-dp2": (4, {**SHARDED, "sharded_data_parallel_degree": 2}),
    "pp2-o2": (4, {**_STATE, "partitions": 2, "microbatches": 2}),
    "pp2-tp2": (4, {"ddp": True, "partitions": 2, "tensor_parallel_degree": 2, "microbatches": 2}),
    "pp2-s2": (4, {**SHARDED, "partitions": 2, "sharded_data_parallel_degree": 2, "microbatches": 2}),
    "tp2-o2": (4, {**_STATE, "tensor_parallel_degree": 2, "prescaled_batch": True}),
    "tp2-s2": (4, {**SHARDED, "tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2, "prescaled_batch": True}),
    "cp2": (2, {"ddp": True, "context_parallel_degree": 2, "microbatches": 2}),
    "cp2-s4": (4, {**SHARDED, "context_parallel_degree": 2, "sharded_data_parallel_degree": 4}),
    "pp2-cp2": (4, {"ddp": True, "partitions": 2, "context_parallel_degree": 2, "microbatches": 2}),
    "cp2-o2": (4, {**_STATE, "context_parallel_degree": 2}),
    "pp4": (4, {"partitions": 4, "microbatches": 4}),
    "tp4": (4, {"ddp": True, "tensor_parallel_degree": 4, "placement_strategy": "TPD"}),
    # Eight processes.
    "pp2-tp2-dp2": (8, {"ddp": True, "partitions": 2, "tensor_parallel_degree": 2, "microbatches": 2}),
    "pp4-o2": (8, {**_STATE, "partitions": 4, "microbatches": 2}),
    "s4-dp2": (8, {**SHARDED, "sharded_data_parallel_degree": 4}),
    "pp2-tp2-s2": (
        8,
        {
            **SHARDED,
            "partitions": 2,
            "tensor_parallel_degree": 2,
            "sharded_data_parallel_degree": 2,
            "prescaled_batch": True,
        },
    ),
}  # fmt: skip


class Net(nn.Module):
    """Residual layers over tokens: tied head, a frozen scale, a buffer, and layers that tensor parallelism divides.

    Args:
        divided: whether these are marked for tensor parallelism.
    """

    def __init__(self, divided: bool = False) -> None:
        super().__init__()
        scope = contextlib.nullcontext()
        if divided:
            import smdistributed.modelparallel.torch as smp

            scope = smp.tensor_parallelism()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        with scope:
            self.positions = nn.Embedding(SEQ, HIDDEN)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.Tanh(), nn.Linear(2 * HIDDEN, HIDDEN)) for _ in range(4)
            )
        self.norm = nn.LayerNorm(HIDDEN)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, HIDDEN))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [batch, seq] -> [batch, seq, vocabulary]
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device).expand(ids.shape))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x) * self.scale + self.shift)


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: with weight decay and without."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 2e-3},
    ]


def muon(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Muon for the first of :func:`groups`, and AdamW for the rest."""
    import smdistributed.modelparallel.torch as smp

    return smp.optimizers.Muon([{**group, "use_muon": at == 0} for at, group in enumerate(groups)], lr=lr)


#: Optimizers of :class:`Training`.
OPTIMIZERS: dict[str, Any] = {"AdamW": torch.optim.AdamW, "Muon": muon}


class Training:
    """One rank's model, optimizer and scheduler, and the same batches at every topology."""

    def __init__(
        self, seed: int = 0, lr: float = 3e-3, optimizer: Any = torch.optim.AdamW, divided: bool | None = None
    ) -> None:
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(seed)
        state = Net().state_dict()
        self.smp = smp
        self.model = smp.DistributedModel(Net(divided=smp.tp_size() > 1 if divided is None else divided))
        self.model.load_state_dict(state)  # modules that tensor parallelism divides have drawn other numbers
        self.optimizer = smp.DistributedOptimizer(
            optimizer(groups(self.model), lr=lr), static_loss_scale=None, dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 256.0},
        )  # fmt: skip
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1.0 + 0.1 * step))
        self._step = training_step(self.model)

    def train(self, first: int, last: int) -> list[float]:
        """Mean losses of the whole batches of the steps ``first`` to ``last``."""
        losses = []
        for loss in updates(self._step, self.optimizer, token_batches(first, last, BATCH)):
            self.scheduler.step()
            losses.append(loss)
        return losses

    def save(self, path: str, tag: str, step: int, **options: Any) -> None:
        """A checkpoint with the scheduler in its user content."""
        content = {"step": step, "scheduler": self.scheduler.state_dict()}
        self.smp.save_checkpoint(path, tag=tag, user_content=content, **options)

    def resume(self, path: str, tag: str | None = None, **options: Any) -> int:
        """The step from which to go on."""
        content = self.smp.resume_from_checkpoint(path, tag=tag, **options)
        self.scheduler.load_state_dict(content["scheduler"])
        return content["step"]

    def tensors(self) -> list[torch.Tensor]:
        """Copies of all that a checkpoint brings back: of the model, and of the optimizer's state."""
        state = [*self.model.module.state_dict().values()]
        for values in self.optimizer.state.values():
            state += values.values()
        return [value.clone() for value in state]


def held(run: Training) -> list[torch.Tensor]:
    """Copies of what this rank itself has of the model and of the optimizer's state, parts of sharded tensors too."""
    from smp_runtime.checkpoint.live_state import live_buffers, live_masters, live_weights

    found = [h.tensor for kind in (live_weights, live_masters, live_buffers) for h in kind(run.model)]
    updated = [p for group in run.optimizer.param_groups for p in group["params"]]  # state is made in another order
    found += [value for p in updated for value in run.optimizer.state.get(p, {}).values()]
    return [torch.as_tensor(value).clone() for value in found]


def train_and_save(path: str, tag: str, first: int, last: int) -> list[float]:
    """A job that trains and saves once."""
    from support.training.checkpoint_training import Training

    run = Training()
    losses = run.train(first, last)
    run.save(path, tag, last)
    return losses


def resume_train_save(path: str, tag: str | None, first: int, last: int, seed: int = 99) -> list[float]:
    """A job that goes on from a checkpoint, for a while, and leaves one of its own."""
    from support.training.checkpoint_training import Training

    run = Training(seed)
    if tag is not None:
        assert run.resume(path, tag) == first
    losses = run.train(first, last)
    run.save(path, str(last), last)
    return losses


def resume_each(path: str, tags: list[str], last: int) -> dict[str, list[float]]:
    """A job that resumes from each checkpoint and goes on; other weights come first."""
    from support.training.checkpoint_training import Training

    run = Training(seed=99)
    return {tag: run.train(run.resume(path, tag), last) for tag in tags}
