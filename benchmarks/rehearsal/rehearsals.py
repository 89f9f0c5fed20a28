"""The configurations that the documentation of model parallelism recommends, rehearsed and planned: verdict and peak of both.

``python benchmarks/rehearsal/rehearsals.py [NAME ...]`` writes the rows of the table in docs/how-it-works/rehearsal.md; each
takes a minute or two on two cores. The script is ``rehearsed_gpt.py`` beside this one, with models of Transformers, checkpointing
of each layer, and AdamW. Nothing is claimed about speed on GPUs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from smp_estimator.planning import plan
from smp_estimator.planning.model_shape import SHAPES
from smp_estimator.rehearsal import RehearsalFailed, rehearse
from smp_estimator.rehearsal.result import on_gpu

SCRIPT = Path(__file__).with_name("rehearsed_gpt.py")
INSTANCE = "ml.p4d.24xlarge"
GIB = 2**30


class Row(NamedTuple):
    """A configuration."""

    shape: str  # a published one
    instances: int
    batch: int  # of a process, or of a tensor parallel group that reads together
    parameters: Mapping[str, Any]
    sequence: int | None = None  # the shape's
    activation_offloading: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Return ``mp_parameters``."""
        offload = {"offload_activations": True} if self.activation_offloading else {}
        return {"ddp": True, **self.parameters, **offload}


def state_sharding(tensor: int, **more: Any) -> dict[str, Any]:
    """Return the parameters of tensor parallelism with sharded optimizer state."""
    found = {"tensor_parallel_degree": tensor, "prescaled_batch": True, "shard_optimizer_state": True, "fp16": True}
    return {**found, **more}


def sharded(degree: int, tensor: int = 1) -> dict[str, Any]:
    """Return the parameters of sharded data parallelism."""
    found: dict[str, Any] = {"sharded_data_parallel_degree": degree, "bf16": True}
    return found if tensor == 1 else {**found, "tensor_parallel_degree": tensor, "prescaled_batch": True}


ROWS = {
    "10B, tensor 4": Row("gpt2-10b", 16, 40, state_sharding(4)),
    "30B, tensor 8": Row("gpt2-30b", 16, 32, state_sharding(8)),
    "30B, tensor 4": Row("gpt2-30b", 16, 32, state_sharding(4)),
    "60B, tensor 8, 2 stages": Row(
        "gpt2-60b", 32, 56, state_sharding(8, pipeline_parallel_degree=2, microbatches=4, active_microbatches=2)
    ),
    "60B, tensor 8": Row("gpt2-60b", 32, 56, state_sharding(8)),
    "NeoX-20B, sharded 16": Row("gpt-neox-20b", 2, 4, sharded(16)),
    "NeoX-20B, sharded 32": Row("gpt-neox-20b", 8, 12, sharded(32)),
    "NeoX-65B, sharded 16, tensor 8": Row("gpt-neox-65b", 64, 8, sharded(16, 8), activation_offloading=True),
    "NeoX-65B, sharded 64, tensor 2": Row("gpt-neox-65b", 64, 2, sharded(64, 2), 4096, activation_offloading=True),
}


def words(row: Row) -> list[str]:
    """Return the script's arguments."""
    shape = SHAPES[row.shape]
    given = {
        "family": "gpt_neox" if "neox" in row.shape else "gpt2",
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "vocabulary": shape.vocabulary,
        "sequence": row.sequence or shape.sequence,
        "batch": row.batch,
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def line(name: str, row: Row) -> str:
    """Return a row of the table."""
    planned = plan(
        row.shape,
        INSTANCE,
        row.instances,
        row.settings,
        row.batch,
        activation_checkpointing="each",
        fused_attention=True,
        fp32_loss=True,  # as the models of Transformers compute it
        **({} if row.sequence is None else {"sequence": row.sequence}),
    )
    began = time.monotonic()
    told = f"| {name} | {row.instances} | {row.batch} | {planned.verdict.value}, {planned.total_bytes / GIB:.1f} |"
    try:
        found = rehearse(
            SCRIPT,
            words(row),
            instance_type=INSTANCE,
            instance_count=row.instances,
            parameters=row.settings,
            other_ranks=False,
        )
    except RehearsalFailed as error:
        return f"{told} failed: {error} |"
    peak = on_gpu(found.fullest)
    fullest = max(found.rehearsal.kinds, key=lambda kind: kind.process_bytes)
    took = f"{time.monotonic() - began:.0f} s, {fullest.process_bytes / GIB:.2f} GiB"
    kinds = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in found.fullest.classes.items() if size > 0.05 * GIB)
    print(
        f"{name}: stage {found.fullest.stage}, {found.fullest.peak_phase} {found.fullest.peak_module}: {kinds}; plan:"
    )
    print(planned)
    ratio = peak / planned.total_bytes - 1
    return f"{told} {found.verdict.value}, {peak / GIB:.1f} | {ratio:+.0%} | {took} |"


def main(names: list[str]) -> None:
    """Print the rows of these names, or all."""
    rows = [line(name, row) for name, row in ROWS.items() if not names or name in names]
    print("| configuration | p4d | batch | plan: verdict, GiB | rehearsal: verdict, GiB | differs | took |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
