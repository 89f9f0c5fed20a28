"""The search against configurations that people made by hand and published: what it finds is never slower by the plan."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from click.testing import CliRunner

from smp_config import ConfigError
from smp_estimator.cli.main import main
from smp_estimator.planning import ModelShape, Plan, Verdict, suggest
from smp_estimator.planning.request import Request, request_for
from smp_estimator.planning.search.planned import search_plans


@dataclass(frozen=True)
class Published:
    """A configuration with its global batch, and where it stands."""

    name: str
    model: Any
    kind: str
    count: int
    samples: int
    batch: int
    settings: dict[str, Any]
    sequence: int = 2048
    checkpointing: str | None = "each"
    extra: dict[str, Any] = field(default_factory=dict)

    def request(self, settings: dict[str, Any] | None = None, **workload: Any) -> Request:
        return request_for(
            self.model,
            self.kind,
            self.count,
            {"ddp": True, "fp16": True, **(settings or {})},
            sequence=self.sequence,
            processes_per_host=None,
            gpu_memory_bytes=None,
            environment=None,
            workload={"batch": 1, **workload},
        )

    def plan(self) -> Plan:
        """As it was published."""
        tensor = {"prescaled_batch": True} if self.settings.get("tensor_parallel_degree", 1) > 1 else {}
        made = self.request({**tensor, **self.settings}, batch=self.batch, activation_checkpointing=self.checkpointing)
        return Plan.of(made)


def megatron(
    size: str, heads: int, hidden: int, layers: int, tensor: int, stages: int, gpus: int, samples: int
) -> Published:
    """A row of Narayanan et al. 2021, table 1: A100 with 80 GB, sequences of 2,048, a vocabulary of 51,200.

    The table has no microbatches: here they have one sample with a pipeline, and four without.
    """
    batch = samples * tensor * stages // gpus
    settings = {
        "tensor_parallel_degree": tensor,
        "pipeline_parallel_degree": stages,
        "microbatches": batch if stages > 1 else max(1, batch // 4),
        "active_microbatches": stages + 2,
    }
    shape = ModelShape(layers, hidden, heads, 51_200, 2048)
    return Published(f"Megatron-LM {size}", shape, "ml.p4de.24xlarge", gpus // 8, samples, batch, settings)


def sagemaker(
    name: str, model: str, count: int, batch: int, settings: dict[str, Any], sequence: int = 512
) -> Published:
    """A row of the tables of SageMaker's documentation, on ml.p4d.24xlarge."""
    tensor, stages = settings.get("tensor_parallel_degree", 1), settings.get("pipeline_parallel_degree", 1)
    samples = batch * count * 8 // (tensor * stages)
    return Published(f"SageMaker {name}", model, "ml.p4d.24xlarge", count, samples, batch, settings, sequence)


_SHARDED = {"shard_optimizer_state": True}
_DEEP = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 8, "microbatches": 4, "active_microbatches": 2}
PUBLISHED = [
    megatron("1.7B", 24, 2304, 24, 1, 1, 32, 512),
    megatron("3.6B", 32, 3072, 30, 2, 1, 64, 512),
    megatron("7.5B", 32, 4096, 36, 4, 1, 128, 512),
    megatron("18.4B", 48, 6144, 40, 8, 1, 256, 1024),
    megatron("39.1B", 64, 8192, 48, 8, 2, 512, 1536),
    megatron("76.1B", 80, 10240, 60, 8, 4, 1024, 1792),
    megatron("145.6B", 96, 12288, 80, 8, 8, 1536, 2304),
    megatron("310.1B", 128, 16384, 96, 8, 16, 1920, 2160),
    megatron("529.6B", 128, 20480, 105, 8, 35, 2520, 2520),
    megatron("1008B", 160, 25600, 128, 8, 64, 3072, 3072),
    # Black et al. 2022, section 2: 96 A100 with 40 GB, ZeRO stage 1, microbatches of 4; the batch of 1,538 to the next multiple.
    Published(
        "GPT-NeoX-20B",
        "gpt-neox-20b",
        "ml.p4d.24xlarge",
        12,
        1536,
        128,
        {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 4, "microbatches": 32, **_SHARDED},
    ),
    # Le Scao et al. 2022, section 3.4, and its repository: 384 A100 with 80 GB, ZeRO stage 1, microbatches of 2, bf16.
    Published(
        "BLOOM-176B",
        ModelShape(70, 14336, 112, 250_880, 2048),
        "ml.p4de.24xlarge",
        48,
        2048,
        256,
        {"tensor_parallel_degree": 4, "pipeline_parallel_degree": 12, "microbatches": 128, **_SHARDED},
    ),
    # Zhang et al. 2022, section 2.4: 992 A100 with 80 GB, fully sharded over 124 groups; 2 million tokens, to the next multiple.
    Published(
        "OPT-175B",
        ModelShape(96, 12288, 96, 50_272, 2048),
        "ml.p4de.24xlarge",
        124,
        992,
        8,
        {"tensor_parallel_degree": 8, "sharded_data_parallel_degree": 124},
    ),
    # Smith et al. 2022, section 2.3: 4,480 A100 with 80 GB in replicas of 280.
    Published(
        "MT-NLG 530B",
        ModelShape(105, 20480, 128, 51_200, 2048),
        "ml.p4de.24xlarge",
        560,
        1920,
        120,
        {"tensor_parallel_degree": 8, "pipeline_parallel_degree": 35, "microbatches": 120},
    ),
    sagemaker("10B", "gpt2-10b", 16, 40, {"tensor_parallel_degree": 4, **_SHARDED}),
    sagemaker("30B", "gpt2-30b", 16, 32, {"tensor_parallel_degree": 8, **_SHARDED}),
    sagemaker("60B", "gpt2-60b", 32, 56, {**_DEEP, **_SHARDED}),
    sagemaker("NeoX-20B, 2 nodes", "gpt-neox-20b", 2, 4, {"sharded_data_parallel_degree": 16}, 2048),
    sagemaker("NeoX-20B, 8 nodes", "gpt-neox-20b", 8, 12, {"sharded_data_parallel_degree": 32}, 2048),
    sagemaker(
        "65B, seq 2048",
        "gpt-neox-65b",
        64,
        8,
        {"sharded_data_parallel_degree": 16, "tensor_parallel_degree": 8, "offload_activations": True},
        2048,
    ),
    sagemaker(
        "65B, seq 4096",
        "gpt-neox-65b",
        64,
        2,
        {"sharded_data_parallel_degree": 64, "tensor_parallel_degree": 2, "offload_activations": True},
        4096,
    ),
]
ALWAYS = {"Megatron-LM 39.1B", "SageMaker 60B", "SageMaker NeoX-20B, 2 nodes"}


@pytest.mark.parametrize(
    "one", [pytest.param(p, id=p.name, marks=[] if p.name in ALWAYS else pytest.mark.full) for p in PUBLISHED]
)
def test_what_is_found_is_never_slower(one: Published) -> None:
    made = one.plan()
    assert made.time is not None
    assert made.batches.global_batch == one.samples
    begin = time.process_time()
    found = search_plans(one.request(), one.samples, budget=120)
    seconds = time.process_time() - begin
    assert found.plan is not None, f"nothing fits, and {one.name} was trained ({made.verdict.value})"
    assert found.plan.verdict is Verdict.FITS
    assert found.plan.batches.global_batch == one.samples
    assert found.plan.time is not None
    gain = 1 - found.plan.time.total / made.time.total
    print(
        f"{one.name}: {made.time.total:.3g} s ({made.verdict.value}), found {found.plan.time.total:.3g} s ({gain:.1%} less): "
        f"{found.found.best and found.found.best.configuration}; {len(found.found.judged)} plans in {seconds:.2f} s"
    )
    assert found.plan.time.total <= made.time.total * (1 + 1e-9)
    assert found.found.possible_gain <= 0.005


def test_a_suggestion_for_a_cluster_searches_all_and_says_which_change_helps() -> None:
    """Two nodes, as SageMaker's table has them, from half of its batch of 4 on each."""
    current = {"sharded_data_parallel_degree": 16, "offload_activations": True, "fp16": True, "microbatches": 4}
    found = suggest(
        "gpt-neox-20b",
        "ml.p4d.24xlarge",
        2,
        4,
        prefer="fastest",
        precision="fp16",
        parameters=current,
        activation_checkpointing="each",
    )
    assert found.search is not None
    assert found.search.is_proven
    assert found.plan.verdict is Verdict.FITS
    assert found.plan.time is not None
    fits = [step.plan.time.total for step in found.tried if step.plan.verdict is Verdict.FITS and step.plan.time]
    assert found.plan.time.total == min(fits)
    assert found.improvements
    first = found.improvements[0]
    assert first.seconds is not None
    assert first.seconds_before is not None
    assert first.seconds < first.seconds_before
    assert [each.seconds for each in found.improvements] == sorted(each.seconds or 0 for each in found.improvements)
    text = " ".join(str(found).split())
    assert "one change" in text
    assert first.what.split(" →")[0] in text
    written = found.to_dict()
    assert written["search"]["evaluated"] == len(found.search.judged)
    assert written["improvements"][0]["seconds_per_step"] == first.seconds


def test_settings_that_no_single_change_helps_and_those_that_do_not_fit() -> None:
    """The best is its own best; and of settings that do not fit, a change that makes them fit is the first."""
    best = suggest("gpt2-xl", "ml.g5.12xlarge", 2, 8, prefer="fastest")
    again = suggest("gpt2-xl", "ml.g5.12xlarge", 2, 8, parameters=best.parameters)
    assert again.improvements == ()
    assert "none makes a step shorter" in str(again)
    whole = suggest("gpt-neox-20b", "ml.p4d.24xlarge", 2, 4, activation_checkpointing="each", parameters={"bf16": True})
    assert whole.improvements
    assert whole.improvements[0].seconds_before is None
    assert whole.improvements[0].plan.verdict is Verdict.FITS
    assert str(whole.improvements[0]).startswith("sharded_data_parallel_degree 16: fits, ")
    with pytest.raises(
        ConfigError, match=r"64 samples cannot be read by 16 replicas .* 3 microbatches .* multiple of 48"
    ):
        suggest("gpt2-xl", "ml.p4d.24xlarge", 2, 4, parameters={"microbatches": 3})
    with pytest.raises(ConfigError, match="single changes are compared on one cluster"):
        suggest("gpt2", "ml.g5.12xlarge", parameters={"ddp": True})


def test_the_command_takes_parameters_and_a_budget() -> None:
    command = [
        "suggest",
        "gpt2-xl",
        "--instance-type",
        "ml.g5.12xlarge",
        "--instance-count",
        "2",
        "--prefer",
        "fastest",
    ]
    given = [
        "--parameters",
        '{"tensor_parallel_degree": 4, "shard_optimizer_state": true, "microbatches": 8}',
        "--batch",
        "8",
    ]
    result = CliRunner().invoke(main, [*command, *given, "--budget", "9", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["search"]["is_proven"]
    assert found["improvements"][0]["seconds_per_step"] < found["improvements"][0]["seconds_before"]
    wrong = CliRunner().invoke(main, [*command, "--budget", "-1"])
    assert "budget is -1" in " ".join(wrong.output.split())
