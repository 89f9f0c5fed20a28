"""The search for a script's degrees: which configurations are rehearsed, what is chosen, and what is said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from smp_config import ConfigError, ModelParallelParameters
from smp_estimator.cli.main import main
from smp_estimator.planning import Verdict
from smp_estimator.rehearsal import rehearse
from smp_estimator.rehearsal import search as script_search
from smp_estimator.rehearsal.least_work import Alone, Grows
from smp_estimator.rehearsal.result import RehearsalFailed, Rehearsed
from smp_estimator.rehearsal.search import ScriptSuggestion, suggest_for_script
from smp_records.rate_card import RateCard
from smp_records.rehearsal import KindReport, MemoryOverTime, ModuleWork, Rehearsal, RehearsalRequest

#: 400 million parameters in 8 blocks, fp32 with Adam; 10^12 operations of a sample forward.
ELEMENTS, BLOCKS, FORWARD = 400_000_000, 8, 1e12
CARD = RateCard.of_instance("ml.g5.12xlarge")


@dataclass
class Cluster:
    """Stands for the rehearsals of a script: steps that are computed from the degrees, a little slower than any bound."""

    memory: int = 24 * 10**9
    checkpoints: bool = False
    offloaded: float = 1.0  # part of activations that stays on the GPU where they are offloaded
    asked: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)

    def __call__(self, script: Any, arguments: Sequence[str], **given: Any) -> Rehearsed:
        parameters: Mapping[str, Any] = given["parameters"]
        self.asked.append((dict(parameters), list(arguments)))
        settings = ModelParallelParameters.from_mp_parameters(dict(parameters))
        world = given["instance_count"] * given["processes_per_host"]
        topology = settings.topology(world)
        stages, tensor = topology.pipeline, topology.tensor
        if stages == 4:
            raise RehearsalFailed(
                "the script fails on stage 3 (rank 9) at train.py:12: ValueError: a block has no head"
            )
        batch = int(arguments[arguments.index("--batch") + 1])
        elements = ELEMENTS / stages / tensor
        compute = (4 if self.checkpoints else 3) * FORWARD * batch / stages / tensor / (0.7 * 35e12) * 1.1
        compute += 1e-3 * settings.microbatches
        compute *= 1 + (stages - 1) / settings.microbatches
        replicas = topology.rdp_size
        hosts = -(-replicas * stages * tensor // given["processes_per_host"])
        sums = CARD.seconds_of_collective("all_reduce", 4 * elements, replicas, hosts)
        if topology.sharded > 1:
            inside = CARD.seconds_of_collective("all_gather", 4 * elements, topology.sharded, -(-topology.sharded // 4))
            copies = replicas // topology.sharded
            sums = 3 * settings.microbatches * inside
            sums += CARD.seconds_of_collective("all_reduce", 4 * elements / topology.sharded, copies, copies)
        shards = topology.sharded if topology.sharded > 1 else 1
        kept = 2e9 * batch / settings.microbatches * min(settings.microbatches, stages) / stages / tensor
        classes = {
            "parameter": round(4 * elements / shards),
            "gradient": round(4 * elements / shards),
            "optimizer state": round(8 * elements / shards / (replicas if settings.shard_optimizer_state else 1)),
            "activation": round(kept * (self.offloaded if settings.offload_activations else 1.0)),
        }
        work = [
            ModuleWork(
                module=f"blocks.{at}.up", phase=phase, dtype="float32", calls=9, flops=each * batch / BLOCKS, bytes=1, seconds=1
            )
            for at in range(BLOCKS)
            for phase, each in (("forward", FORWARD), ("backward", (3 if self.checkpoints else 2) * FORWARD))
        ]  # fmt: skip
        report = KindReport(
            stage=0, rank=0, stands_for=world, parameters=round(elements), steps=3, peak_bytes=sum(classes.values()),
            peak_phase="backward", peak_module="blocks.3", peak_line="", resident_bytes=0, first_step_peak_bytes=0,
            classes=classes, holders=[], curve=MemoryOverTime(seconds=[], owners={}), collectives=[], links=[],
            work=work, step_seconds=compute + sums,
        )  # fmt: skip
        request = RehearsalRequest(hosts=given["instance_count"], ranks_per_host=given["processes_per_host"], folder="")
        rehearsal = Rehearsal(request=request, mp_parameters=dict(parameters), kinds=[report], seconds=1.0)
        return Rehearsed(rehearsal, given["gpu_memory_bytes"])


def suggested(cluster: Cluster, **more: Any) -> ScriptSuggestion:
    given: dict[str, Any] = {"instance_type": "ml.g5.12xlarge", "instance_count": 2, "global_batch": 64, **more}
    return suggest_for_script("train.py", ["--batch", "{batch}"], gpu_memory_bytes=cluster.memory, run=cluster, **given)


def by_brute_force(cluster: Cluster, found: ScriptSuggestion) -> float:
    best = float("inf")
    for at in found.space.all():
        try:
            one = Cluster(cluster.memory)(
                "train.py",
                ["--batch", str(found.space.batch(at))],
                instance_count=2,
                processes_per_host=4,
                parameters={"ddp": True, **at.settings()},
                gpu_memory_bytes=cluster.memory,
            )
        except RehearsalFailed:
            continue
        if one.verdict is Verdict.FITS:
            best = min(best, one.rehearsal.kinds[0].step_seconds)
    return best


@pytest.mark.parametrize(("memory", "tensor"), [(24, False), (9, True), (4, False)])
def test_what_is_found_is_the_best_with_few_rehearsals(memory: int, tensor: bool) -> None:
    cluster = Cluster(memory * 10**9)
    found = suggested(cluster, tensor_parallelism=tensor)
    assert found.best is not None
    assert found.best.worth <= by_brute_force(cluster, found) * 1.02
    assert found.found.is_proven
    every = sum(1 for _ in found.space.all())
    assert len(cluster.asked) < 0.5 * every, every
    for parameters, arguments in cluster.asked[2:]:
        settings = ModelParallelParameters.from_mp_parameters(parameters)
        assert settings.topology(8).rdp_size * int(arguments[1]) == 64  # the global batch stays


def test_a_script_that_fails_with_some_degrees_is_told_and_passed_over() -> None:
    told: list[str] = []
    found = suggested(Cluster(5 * 10**9), tell=told.append)
    failed = [one for one in found.found.judged if "a block has no head" in one.evaluated.why]
    assert all(one.configuration.pipeline == 4 for one in failed)
    assert told[0].startswith("one GPU: 400,000,000 parameters")
    assert len(told) == 1 + len(found.found.judged)


def test_settings_that_were_given_and_the_single_change_that_helps() -> None:
    """Two stages with two microbatches wait a third of the step; what is not searched stays."""
    cluster = Cluster()
    given = {"pipeline_parallel_degree": 2, "microbatches": 2, "memory_weight": 0.5}
    found = suggested(cluster, parameters=given)
    assert found.before is not None
    assert found.before.configuration.microbatches == 2
    assert all(parameters["memory_weight"] == 0.5 for parameters, _ in cluster.asked)
    assert found.parameters["memory_weight"] == 0.5
    what, first = found.changes[0]
    assert first.worth == min(judged.worth for _, judged in found.changes) < found.before.worth
    text = " ".join(str(found).split())
    assert f"one change {what}" in text
    assert found.best is not None
    assert f"parameters {found.parameters}"[:40] in text
    written = json.loads(json.dumps(found.to_dict()))
    assert written["fits"]
    assert written["parameters"] == found.parameters
    assert written["search"]["evaluated"] == len(written["rehearsed"]) == len(found.found.judged)
    assert written["rehearsed"][0]["usd_per_step"] == pytest.approx(
        2 * 5.672 * written["rehearsed"][0]["seconds_per_step"] / 3600
    )


def test_a_budget_that_ends_early_does_not_say_that_no_change_helps() -> None:
    found = suggested(Cluster(), parameters={"pipeline_parallel_degree": 2, "microbatches": 2}, budget=1e-9)
    assert len(found.found.judged) == 1
    assert not found.found.is_proven
    assert "the budget ended before one was found" in " ".join(str(found).split())


def test_nothing_fits() -> None:
    found = suggested(Cluster(10**8))
    assert (found.best, found.verdict) == (None, Verdict.DOES_NOT_FIT)
    assert "nothing that was rehearsed fits" in str(found)


def rows(scale: float) -> list[ModuleWork]:
    """Of a batch of 4 times the scale: 2 kernels each, weights of 510 GB that are read once for all samples, and 51 GB of each."""
    return [
        ModuleWork(
            module=m, phase=p, dtype=d, calls=2, flops=f * scale, bytes=round((510 + 4 * 51 * scale) * 1e9), seconds=9.0
        )
        for m, p, d, f in (
            ("h.0.a", "forward", "float32", 24.5e12),
            ("h.1", "backward", "float32", 49e12),
            ("h.1.b", "forward", "bfloat16", 49e12),
            ("layers.0", "update", "float32", 1e15),
            ("", "outside", "int64", 0.0),
        )
    ]


def alone() -> Alone:
    """One GPU with batches of 4 and of 8, whose peaks are 40 and 70 bytes."""
    kinds = [
        KindReport(
            stage=0, rank=0, stands_for=1, parameters=10, trained_parameters=4, steps=3, peak_bytes=peak, peak_phase="backward",
            peak_module="", peak_line="", resident_bytes=0, first_step_peak_bytes=0,
            classes={"parameter": 20, "optimizer state": 5}, holders=[], curve=MemoryOverTime(seconds=[], owners={}),
            collectives=[], links=[], work=rows(scale), step_seconds=1.0,
        )
        for scale, peak in ((1.0, 40), (2.0, 70))
    ]  # fmt: skip
    return Alone((4, 8), (kinds[0], kinds[1]))


def test_operations_alone_make_the_bound_of_a_sample() -> None:
    """Of 70 % of 35 TFLOP/s (and of 70 in bf16); launches and memory are left out, since larger batches share them."""
    needs = alone().needs(CARD)
    assert (needs.forward, needs.backward) == (pytest.approx(0.5), pytest.approx(0.5))
    assert alone().layers == 2


def test_a_microbatch_has_weights_and_kernels_besides() -> None:
    """Of 85 % of 600 GB/s: 1 s for the weights and 0.1 s for each sample, of every module; 10 µs of two kernels."""
    needs = alone().needs(CARD)
    assert needs.of_microbatch is not None
    # Operations take 0.25 s of a sample in each row of forward, 0.5 s in backward.
    assert needs.of_microbatch(2) == (pytest.approx(2 * 1.2 + 2e-5), pytest.approx(1.2 + 1e-5))
    assert needs.of_microbatch(10) == (pytest.approx(2 * 2.5 + 2e-5), pytest.approx(5.0 + 1e-5))
    assert needs.update == pytest.approx(1.0)


def test_bytes_of_state_and_of_the_larger_batch_s_peak() -> None:
    needs = alone().needs(CARD)
    assert (needs.elements, needs.layer_elements) == (10, 4)  # what is not trained is not summed up
    assert (needs.kept_bytes, needs.updated_bytes, needs.activation_bytes) == (2.0, 0.5, 7.5)


def test_what_shrinks_with_the_samples_counts_as_its_least_part() -> None:
    assert Grows.through((4, 8), (10.0, 14.0)) == Grows(6.0, 1.0)
    assert Grows.through((4, 8), (4.0, 12.0)) == Grows(0.0, 1.0)  # more than twice as much
    assert Grows.through((4, 8), (8.0, 6.0)) == Grows(8.0, 0.0)


def test_a_script_that_computes_forward_again_may_offload() -> None:
    """Backward with three times the operations of forward; offloading is asked for where nothing else fits."""
    cluster = Cluster(checkpoints=True)
    found = suggested(cluster)
    assert found.space.memories == ("again",)
    assert not any("offload_activations" in parameters for parameters, _ in cluster.asked)
    full = Cluster(memory=11 * 10**8, checkpoints=True, offloaded=0.01)
    tight = suggested(full)
    assert tight.best is not None
    assert tight.space.memories == ("again", "offloaded")
    assert len(full.asked) == len({str(each) for each in full.asked})  # none is rehearsed twice
    assert tight.parameters["offload_activations"]
    assert suggested(Cluster()).space.memories == ("kept",)


#: A chain of blocks that reads batches of the size that it is told.
SCRIPT = """
import argparse
import torch
import smdistributed.modelparallel.torch as smp
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
batch = parser.parse_known_args()[0].batch
smp.init()
model = smp.DistributedModel(torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
@smp.step
def step(x):
    model.backward(model(x).square().mean())
for _ in range(4):
    optimizer.zero_grad()
    step(torch.randn(batch, 2048))
    optimizer.step()
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_real_script_is_searched(tmp_path: Path) -> None:
    """Two GPUs, all configurations: what is chosen takes the time that a rehearsal of it by itself finds."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    cluster: dict[str, Any] = {"instance_type": "ml.g5.12xlarge", "instance_count": 1, "processes_per_host": 2}
    found = suggest_for_script(script, ["--batch", "{batch}"], global_batch=8, parameters={"ddp": True}, **cluster)
    assert found.best is not None
    assert found.found.is_proven
    assert 0 < len(found.found.judged) < sum(1 for _ in found.space.all())
    again = rehearse(script, ["--batch", str(found.batch)], parameters=found.parameters, **cluster)
    assert found.best.evaluated.seconds == pytest.approx(again.rehearsal.step_seconds, rel=0.05)
    plain = rehearse(script, ["--batch", "4"], parameters={"ddp": True}, **cluster)
    assert found.best.worth <= plain.rehearsal.step_seconds * 1.02


def test_what_cannot_be_searched_is_refused() -> None:
    for arguments in ([], ["--batch", "8"]):
        with pytest.raises(ConfigError, match=r"has \{batch\} in it"):
            suggest_for_script("t.py", arguments, instance_type="ml.g5.12xlarge", instance_count=1, global_batch=8)
    with pytest.raises(ConfigError, match="a search compares stages that own one piece"):
        suggested(Cluster(), parameters={"virtual_stages": 2})
    with pytest.raises(ConfigError, match="not in the catalogue"):
        suggested(Cluster(), instance_type="ml.p9.large")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    cluster = Cluster()
    monkeypatch.setattr(script_search, "rehearse", cluster)
    cluster_options = ["--instance-type", "ml.g5.12xlarge", "--instance-count", "2", "--global-batch", "64"]
    command = ["suggest", "--script", str(script), *cluster_options]
    result = CliRunner().invoke(main, [*command, "--precision", "fp32", "--json", "--", "--batch", "{batch}"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fits"]
    assert "rehearsed" in found
    assert all(arguments[0] == "--batch" for _, arguments in cluster.asked)
    for wrong, words in (
        (
            ["suggest", "--script", str(script), "--global-batch", "8", "--", "--batch", "{batch}"],
            "give --instance-type",
        ),
        ([*command[:7], "--", "--batch", "{batch}"], "give --global-batch"),
        (["suggest", "gpt2", "--batch", "1", "--", "more"], "only --script has arguments"),
    ):
        said = CliRunner().invoke(main, wrong)
        assert said.exit_code == 1
        assert words in " ".join(said.output.split()), said.output
