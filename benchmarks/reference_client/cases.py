"""Jobs of the reference client, and which of them must train alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: The hyperparameters of every job: tiny models without dropout, six updates.
SHARED = {
    "use_smp_implementation": 1,
    "fp8": 0,
    "bf16": 0,
    "hidden_width": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 128,
    "max_context_width": 32,
    "max_steps": 6,
    "activation_checkpointing": 0,
    "delayed_param": 0,
    "train_batch_size": 2,
    "log_reduced_training_loss": 1,
    "zipped_data": 0,
    "lr": 0.01,
    "lr_decay_iters": 10,
    "warmup": 0.1,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "sharding_strategy": "hybrid_shard",
    "save_final_model": 1,
}

_LLAMA = {"model_type": "llama_v3", "llama_intermediate_size": 64, "num_key_value_heads": 2}
_MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2, "intermediate_size": 64}

MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "intermediate_size": 64},
    "gpt_neox": {"model_type": "gpt_neox"},
    "mixtral": {**_MIXTRAL, "moe": 0},
    "mixtral with MoEConfig": {**_MIXTRAL, "moe": 1, "moe_load_balancing": "sinkhorn"},
}

#: Topologies by name: processes and parameters. Those of ``degree 1`` are the references.
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {"hybrid_shard_degree": 1}),
    "1 x 2 copies": (2, {"hybrid_shard_degree": 1}),
    "shard 2": (2, {"hybrid_shard_degree": 2}),
    "tp 2": (2, {"hybrid_shard_degree": 1, "tensor_parallel_degree": 2}),
    "shard 2 x tp 2": (4, {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}),
    "ep 2": (2, {"hybrid_shard_degree": 1, "expert_parallel_degree": 2}),
    "cp 2": (2, {"hybrid_shard_degree": 2, "context_parallel_degree": 2}),
    "cp 2, shard 1": (2, {"hybrid_shard_degree": 1, "context_parallel_degree": 2}),
}

#: The topology of degree 1 with as many batches at once.
REFERENCES = {
    "1 x 2 copies": "1 x 2 copies",
    "shard 2": "1 x 2 copies",
    "tp 2": "1",
    "shard 2 x tp 2": "1 x 2 copies",
    "ep 2": "1 x 2 copies",
    "cp 2": "1",
    "cp 2, shard 1": "1",
}


@dataclass(frozen=True)
class Case:
    """A job and its reference, whose losses it must equal.

    Attributes:
        model: its name in :data:`MODELS`.
        topology: its name in :data:`TOPOLOGIES`.
        more: further hyperparameters.
        reference: the hyperparameters and the topology of the job that it is compared with; None compares with nothing.
        tolerance: of each loss, relative.
        resumed: the type of the checkpoint that the job writes after its third update, and that a second one resumes from.
    """

    model: str
    topology: str
    more: dict[str, Any] = field(default_factory=dict)
    reference: tuple[dict[str, Any], str] | None = None
    tolerance: float = 1e-5
    resumed: str = ""

    @property
    def name(self) -> str:
        words = [f"{name} {value}" for name, value in self.more.items() if name != "checkpoint_type"]
        return ", ".join([self.model, self.topology, *words, *([f"resumed, {self.resumed}"] if self.resumed else [])])


def _against_degree_1(model: str, topology: str, more: dict[str, Any] | None = None, **given: Any) -> Case:
    return Case(model, topology, more or {}, ({}, REFERENCES[topology]), **given)


def list_cases() -> list[Case]:
    """Return all pairs, in the order of the table."""
    cases = [
        _against_degree_1(model, topology)
        for model in ("llama", "mistral", "gpt_neox", "mixtral")
        for topology in ("shard 2", "tp 2", "shard 2 x tp 2")
    ]
    cases += [_against_degree_1("mixtral with MoEConfig", topology) for topology in ("shard 2", "ep 2")]
    cases += [_against_degree_1("llama", topology) for topology in ("cp 2", "cp 2, shard 1")]
    for model in ("llama", "mistral", "gpt_neox", "mixtral"):
        cases.append(Case(model, "shard 2", {"delayed_param": 1}, ({"delayed_param": 1}, "1 x 2 copies")))
    cases.append(Case("llama", "shard 2 x tp 2", {"delayed_param": 1}, ({"delayed_param": 1}, "1 x 2 copies")))
    bf16 = {"bf16": 1}
    half = [("llama", topology) for topology in ("shard 2", "tp 2", "shard 2 x tp 2", "cp 2")]
    half += [(model, "shard 2 x tp 2") for model in ("mistral", "gpt_neox", "mixtral")]
    half += [("mixtral with MoEConfig", topology) for topology in ("shard 2", "ep 2")]
    for model, topology in half:
        cases.append(Case(model, topology, bf16, (bf16, REFERENCES[topology]), tolerance=2e-2))
    cases.append(_against_degree_1("llama", "shard 2", {"activation_checkpointing": 1}))
    cases.append(_against_degree_1("mistral", "shard 2 x tp 2", {"activation_checkpointing": 1}))
    for kind in ("sharded", "local", "async_sharded"):
        cases.append(Case("llama", "shard 2", {}, ({}, "shard 2"), resumed=kind))
    # The client loads the schedule's state of such a checkpoint, and never hands it to the schedule: one rate throughout.
    constant = {"lr_decay_style": "constant", "warmup": 0.0}
    cases.append(Case("llama", "shard 2", constant, (constant, "shard 2"), resumed="async_local"))
    cases.append(Case("llama", "shard 2 x tp 2", {}, ({}, "shard 2 x tp 2"), resumed="async_sharded"))
    cases.append(Case("mixtral with MoEConfig", "ep 2", {}, ({}, "ep 2"), resumed="sharded"))
    cases.append(Case("llama", "cp 2, shard 1", {}, ({}, "cp 2, shard 1"), resumed="sharded"))
    return cases
