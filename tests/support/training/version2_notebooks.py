"""What the notebooks of version 2 in amazon-sagemaker-examples (2d519b52c) ask for: facts of their estimators, by notebook."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NotebookJob:
    """The job of one notebook's estimator.

    Attributes:
        name: the notebook's file without ``sm-fsdp-``.
        degrees: tensor, context and expert parallel degrees that it gives.
        shards: ``hybrid_shard_degree``.
        offloads: ``sm_activation_offloading``.
        gpus: kind of instances.
        hosts: their number.
        framework_version: of PyTorch.
        sizes: hyperparameters of the model.
        on_file_system: its data and checkpoints are on FSx for Lustre, not in S3.
    """

    name: str
    degrees: dict[str, int]
    shards: int
    offloads: bool
    sizes: dict[str, Any]
    gpus: str = "ml.p4d.24xlarge"
    hosts: int = 1
    framework_version: str = "2.4.1"
    on_file_system: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "hybrid_shard_degree": self.shards,
            "sm_activation_offloading": self.offloads,
            "activation_loading_horizon": 2,
            **{f"{name}_parallel_degree": degree for name, degree in self.degrees.items()},
        }

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return {**_SHARED, **self.sizes, **self.more}


#: What all nine give.
_SHARED = {
    "activation_checkpointing": 1,
    "auto_wrap_policy": "transformer_auto_wrap_policy",
    "backward_fetch_policy": "backward_pre",
    "beta1": 0.9,
    "beta2": 0.95,
    "bf16": 1,
    "delayed_param": 1,
    "forward_prefetch": 1,
    "limit_all_gathers": 1,
    "lr": 0.0001,
    "lr_decay_iters": 47683,
    "lr_decay_style": "cosine",
    "min_lr": 1e-05,
    "seed": 12345,
    "sharding_strategy": "hybrid_shard",
    "use_smp_implementation": 1,
    "warmup": 0.0032,
    "weight_decay": 0.2,
}


def _sizes(kind: str, hidden: int, layers: int, heads: int, width: int = 2048, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_width": hidden, "num_layers": layers, "num_heads": heads, "max_context_width": width}
    return {"model_type": kind, **sizes, **more}


_MIXTURE = {"moe": 1, "moe_load_balancing": "sinkhorn", "moe_all_to_all_dispatcher": 1}

NOTEBOOKS = (
    NotebookJob(
        "tp_finetuning_gpt-neox",
        {"tensor": 4},
        8,
        True,
        _sizes("gpt_neox", 6144, 44, 64),
        hosts=4,
        framework_version="2.3.1",
        on_file_system=True,
        more={"patch_neox_rope": 0, "distributed_backend": "nccl"},
    ),
    NotebookJob(
        "tp_train_gpt-neox", {"tensor": 2}, 4, True, _sizes("gpt_neox", 4096, 32, 32, 1024), on_file_system=True
    ),
    NotebookJob(
        "tp-cp_train_llama_v2_v3",
        {"tensor": 2, "context": 2},
        4,
        False,
        _sizes("llama_v2", 4096, 32, 32, llama_intermediate_size=11008),
    ),
    NotebookJob(
        "tp-fp8_train_llama_v2_v3",
        {"tensor": 2},
        4,
        False,
        _sizes("llama_v2", 4096, 32, 32, llama_intermediate_size=11008, fp8=1),
        gpus="ml.p5.48xlarge",
    ),
    NotebookJob(
        "tp_finetuning_llama_v2_v3",
        {"tensor": 2},
        4,
        True,
        _sizes("llama_v2", 4096, 32, 32, 4096, llama_intermediate_size=11008),
        on_file_system=True,
    ),
    NotebookJob(
        "tp-fp8_train_llama_v3d1",
        {"tensor": 2},
        4,
        False,
        _sizes("llama_v3", 4096, 32, 32, 4096, llama_intermediate_size=14336, fp8=1),
        gpus="ml.p5.48xlarge",
    ),
    NotebookJob(
        "tp_finetuning_llama_v3d1",
        {"tensor": 2},
        4,
        True,
        {"model_type": "llama_v3", "rope_scaling_type": "llama3", "rotary_emb_base": 500000, "fp8": 0},
        on_file_system=True,
    ),
    NotebookJob(
        "ep-fp8_train_mixtral",
        {"expert": 2},
        4,
        False,
        _sizes("mixtral", 2048, 8, 16, num_local_experts=4, fp8=1),
        gpus="ml.p5.48xlarge",
        more=_MIXTURE,
    ),
    NotebookJob(
        "ep_train_mixtral",
        {"expert": 2},
        32,
        False,
        _sizes("mixtral", 4096, 32, 32, num_key_value_heads=8, num_local_experts=8, fp8=0),
        hosts=8,
        more=_MIXTURE,
    ),
)
