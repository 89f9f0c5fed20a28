"""Time and price of a step, against values that were computed by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smp_config import ConfigError
from smp_estimator.planning import ModelShape, plan, suggest
from smp_estimator.planning.context import ContextShare

#: 12 layers of 12 · 768² + 13 · 768 parameters, 768 wide, 1,024 tokens, vocabulary 50,257: 2 × 85,054,464 operations of a
#: token in matrices, 4 × 12 × 1,024 × 768 in attention, 2 × 50,257 × 768 for its logits.
GPT2_FORWARD = 170_108_928 + 37_748_736 + 77_194_752
#: Its parameters.
GPT2 = 124_439_808
BF16 = {"ddp": True, "bf16": True}

PLAIN = ModelShape(8, 512, 8, 1000, 256, learned_positions=False, biases=False)
#: 12 · 512² in matrices and two norms of 512, in 8 layers.
PLAIN_LAYERS = 8 * (12 * 512**2 + 2 * 512)
PLAIN_FORWARD = 2 * PLAIN_LAYERS + 4 * 8 * 256 * 512


def seconds(model: Any, kind: str, count: int, parameters: dict[str, Any], batch: int, **more: Any) -> Any:
    time = plan(model, kind, count, parameters, batch, **more).time
    assert time is not None
    return time


def test_one_gpu_does_arithmetic_only() -> None:
    time = seconds("gpt2", "ml.g5.xlarge", 1, BF16, 8)
    tokens = 8 * 1024
    assert time.operations == 3 * tokens * GPT2_FORWARD
    assert time.peak == 70e12
    assert time.total == time.arithmetic == pytest.approx(3 * tokens * GPT2_FORWARD / 35e12)
    assert time.total == pytest.approx(0.2001556, rel=1e-6)
    assert time.tokens_per_second == pytest.approx(tokens / 0.2001556, rel=1e-6)


def test_checkpointing_computes_the_layers_once_more() -> None:
    plain = seconds("gpt2", "ml.g5.xlarge", 1, BF16, 8)
    again = seconds("gpt2", "ml.g5.xlarge", 1, BF16, 8, activation_checkpointing="each")
    assert again.operations - plain.operations == 8 * 1024 * (170_108_928 + 37_748_736)


@pytest.mark.parametrize(("precision", "peak"), [({}, 19.5), ({"fp16": True}, 312), ({"bf16": True}, 312)])
def test_the_peak_is_that_of_the_precision(precision: dict[str, bool], peak: float) -> None:
    assert seconds("gpt2", "ml.p4d.24xlarge", 1, {"ddp": True, **precision}, 1).peak == peak * 1e12
    if precision.get("bf16"):  # without units for it
        assert seconds("gpt2", "ml.p3.2xlarge", 1, BF16, 1).peak == 15.7e12


def test_gradients_are_hidden_behind_backward() -> None:
    """16 GPUs on two hosts: 2 · 15/16 of the gradients, in fp32, leave a host once, over 400 Gbit/s."""
    sent = 2 * 15 / 16 * GPT2 * 4 / 50e9
    assert sent == pytest.approx(0.018666, rel=1e-4)
    large = seconds("gpt2", "ml.p4d.24xlarge", 2, BF16, 8)
    assert large.data == pytest.approx(sent)
    assert large.total == large.arithmetic == pytest.approx(0.0449067, rel=1e-5)
    small = seconds("gpt2", "ml.p4d.24xlarge", 2, BF16, 1)
    backward = 2 * 1024 * GPT2_FORWARD / 156e12
    assert small.hidden == pytest.approx(backward)
    assert small.total == pytest.approx(1.5 * backward + sent - backward)


def test_sequences_that_are_shared_out_take_a_part_of_the_time_and_of_the_links() -> None:
    long = ModelShape(8, 512, 8, 1000, 65_536, learned_positions=False, biases=False)
    forward = 2 * PLAIN_LAYERS + 4 * 8 * 65_536 * 512
    head = 2 * 1000 * 512

    def given(method: str) -> dict[str, Any]:
        return {**BF16, "context_parallel_degree": 8, "context_parallel": method}

    whole = seconds(long, "ml.p4d.24xlarge", 1, BF16, 1)
    ring = seconds(long, "ml.p4d.24xlarge", 1, given("ring"), 1)
    assert ring.operations == whole.operations / 8 == 3 * 65_536 / 8 * (forward + head)
    assert ring.tokens == whole.tokens / 8
    assert ring.context == 0  # keys travel while others are computed with
    heads = seconds(long, "ml.p4d.24xlarge", 1, given("all_to_all"), 1)
    sent = 8 * 2 * 4 * 512 * 7 / 64 * 65_536 * 2  # layers, passes, tensors, elements, bytes
    assert heads.context == pytest.approx(sent / 300e9)
    assert heads.total == pytest.approx(ring.total + heads.context)
    assert heads.to_dict()["context_parallel"] == heads.context
    short = ModelShape(8, 512, 8, 1000, 256, learned_positions=False, biases=False)
    at_once = seconds(short, "ml.p4d.24xlarge", 1, given("all_gather"), 1)
    keys = 8 * 3 * 2 * 512 * 7 / 8 * 256 * 2
    beside = 3 * 256 * 4 * 8 * 256 * 512 / 8 / 156e12 / 8
    assert at_once.context == pytest.approx(keys / 300e9 - beside)


def test_fsdp2_waits_for_keys_and_gradients_of_other_ranks_where_layers_are_compiled() -> None:
    """A group has a rank on each of eight hosts: 7/8 of all keys and values, three times, and eight times their fp32 gradients."""
    shape = ModelShape(4, 1024, 8, 1000, 65_536, learned_positions=False, given_key_heads=2)
    given = {"bf16": True, "ddp": True, "sharded_data_parallel_degree": 8, "context_parallel_degree": 8}
    given |= {"tensor_parallel_degree": 8, "prescaled_batch": True}
    how: dict[str, Any] = {"engine": "fsdp2", "activation_checkpointing": "each"}
    compiled, alone = (seconds(shape, "ml.p5.48xlarge", 8, given, 1, compiled=each, **how) for each in (True, False))
    bytes_of_layer = (3 * 7 / 8 * 2 + 4) * 65_536 * 2 * 1024 / 8
    assert compiled.context == pytest.approx(4 * bytes_of_layer / (400e9 / 8 * 0.8))
    # An operation at a time, messages travel beside the blocks, but for the first.
    assert compiled.context / 8 <= alone.context < compiled.context
    # Results of blocks are merged: bytes of seven blocks, in forward, its repetition, and backward.
    memory = 3350e9 * 0.85
    merged = 4 * 8192 * 7 * 128 * (2 * 10 + 30) / memory
    whole = seconds(shape, "ml.p5.48xlarge", 8, given | {"context_parallel_degree": 1}, 1, compiled=True, **how)
    assert compiled.arithmetic == pytest.approx(whole.arithmetic / 8 + merged, rel=1e-6)
    assert whole.context == 0


_COUNTED = """
import torch, torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MOVES = {"_to_copy", "cat", "clone", "add_", "sub", "mul", "sigmoid", "log_sigmoid_forward", "zeros_like"}


class Count(TorchDispatchMode):
    moved = sent = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        read = 0 if name == "zeros_like" else sum(t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        wrote = sum(t.nbytes for t in tree_leaves(found) if isinstance(t, torch.Tensor))
        self.moved += read + wrote if name in MOVES else 0
        self.sent += {"all_gather_into_tensor": wrote * 7 / 8, "all_to_all_single": wrote}.get(name, 0)
        return found


def forward(q, k, v, **_):
    return torch.empty_like(q), torch.empty(q.shape[:3])


def backward(query, key, value, **_):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


for rank in (0, 7):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    q, k, v = (torch.zeros(1, 4, 256, 64, dtype=torch.bfloat16) for _ in range(3))
    given = (dist.group.WORLD, 2)
    with Count() as there:
        out, lse = attention._templated_ring_attention(*given, forward, q, k, v, is_causal=True)
    with Count() as back:
        given = (*given, backward, q, "grad_out", q, k, v, out, lse)
        attention._templated_ring_attention_backward(*given, is_causal=True)
    print(*(each / q.numel() for each in (there.moved, back.moved, there.sent, back.sent)))
    dist.destroy_process_group()
"""


def test_the_bytes_of_pytorchs_context_parallel_are_those_that_its_code_moves() -> None:
    """Counted operation by operation, with attention itself left out, for the first and the last of eight ranks."""
    pytest.importorskip("torch")
    found = subprocess.run([sys.executable, "-c", _COUNTED], check=True, capture_output=True, text=True, timeout=120)
    counted = [[float(each) for each in line.split()] for line in found.stdout.splitlines()]
    there, back, sent, returned = (sum(pair) / 2 for pair in zip(*counted, strict=True))
    share = ContextShare(8, "all_gather", 1, 4, 4, 64, is_pytorch=True)
    # For each of seven blocks, and each element of a rank's queries.
    forward, backward = (each / 256 for each in share.merged_bytes(1, compiled=False))
    assert there == pytest.approx(forward, rel=0.03)
    assert back == pytest.approx(backward, rel=0.03)
    # Of a token of the whole sequence, in elements of two bytes; an eighth of the tokens are here.
    assert sent == 8 * 2 * share.forward_elements(1) / 256
    assert returned == 8 * 2 * share.backward_elements(1) / 256


def test_inside_a_host_the_links_count() -> None:
    nvlink = seconds("gpt2", "ml.p4d.24xlarge", 1, BF16, 1)
    assert nvlink.data == pytest.approx(2 * 7 / 8 * GPT2 * 4 / 300e9)
    pcie = seconds("gpt2", "ml.g5.48xlarge", 1, BF16, 1)
    assert pcie.data == pytest.approx(2 * 7 / 8 * GPT2 * 4 / 31.5e9)


def test_only_the_last_pass_of_an_accumulation_hides_gradients() -> None:
    once = seconds("gpt2", "ml.p4d.24xlarge", 2, BF16, 1)
    four = seconds("gpt2", "ml.p4d.24xlarge", 2, BF16, 1, accumulation=4)
    assert four.arithmetic == pytest.approx(4 * once.arithmetic)
    assert four.hidden == pytest.approx(once.hidden)


def test_parameters_of_a_sharded_optimizer_state_are_gathered_in_the_open() -> None:
    """The sums, of 4 bytes, are hidden; the parameters, of 2, are gathered when the optimizer has stepped."""
    time = seconds("gpt2", "ml.p4d.24xlarge", 1, {**BF16, "shard_optimizer_state": True}, 8)
    assert time.data == pytest.approx(7 / 8 * GPT2 * (4 + 2) / 300e9)
    assert time.total - time.arithmetic == pytest.approx(7 / 8 * GPT2 * 2 / 300e9)


def test_sharding_hides_behind_all_arithmetic_and_averages_in_the_open() -> None:
    settings = {**BF16, "sharded_data_parallel_degree": 8, "sdp_param_persistence_threshold": 0}
    time = seconds("gpt2", "ml.p4d.24xlarge", 2, settings, 8)
    gathered = (2 * 7 / 8 * GPT2 * 2 + 7 / 8 * GPT2 * 4) / 300e9
    # Each of the 8 ranks of a host averages its shard with one of the other host.
    averaged = 2 * 1 / 2 * (GPT2 / 8) * 4 * 8 / 50e9
    assert time.data == pytest.approx(gathered + averaged)
    assert time.hidden == pytest.approx(gathered)
    assert time.total == pytest.approx(time.arithmetic + averaged)
    across = seconds("gpt2", "ml.p4d.24xlarge", 2, {**settings, "sharded_data_parallel_degree": 16}, 8)
    assert across.data == pytest.approx((2 * 15 / 16 * GPT2 * 2 + 15 / 16 * GPT2 * 4) / 50e9)


def test_every_microbatch_of_sharded_parameters_gathers_and_sums_for_itself() -> None:
    """As the runtime does (tests/sharding/test_traffic.py); what replicas average goes once."""
    settings = {**BF16, "sharded_data_parallel_degree": 8, "sdp_param_persistence_threshold": 0}
    once, four = (plan("gpt2", "ml.p4d.24xlarge", 2, {**settings, "microbatches": m}, 8).traffic for m in (1, 4))
    assert four.data_late == once.data_late
    assert four.data - four.data_late == pytest.approx(4 * (once.data - once.data_late))


def test_tensor_parallelism_and_a_pipeline() -> None:
    """tp 8 inside each of two hosts, pp 2 across them, 4 microbatches of a batch of 8."""
    settings = {
        **BF16,
        "tensor_parallel_degree": 8,
        "prescaled_batch": True,
        "pipeline_parallel_degree": 2,
        "microbatches": 4,
        "placement_strategy": "DPT",
    }
    time = seconds(PLAIN, "ml.p4d.24xlarge", 2, settings, 8)
    tokens = 8 * 256
    # Layers are divided by both degrees; the output matrix by the pipeline only, as the embedding is whole.
    assert time.operations == pytest.approx(3 * tokens * (PLAIN_FORWARD / 16 + 2 * 1000 * 512 / 2))
    hidden_bytes = tokens * 512 * 2
    assert time.tensor == pytest.approx(4 * 4 * 2 * 7 / 8 * hidden_bytes / 300e9)
    # A stage waits (p − 1)/(m + p − 1) = 1/5 of a step, a quarter of what it works.
    assert time.idle == pytest.approx((time.arithmetic + time.tensor) / 4)
    # Each of the 8 ranks sends an eighth of the activations over the shared network.
    assert time.pipeline == pytest.approx(hidden_bytes / 8 * 8 / 50e9)
    assert time.data == 0  # there is one replica
    assert time.total == pytest.approx(time.arithmetic + time.tensor + time.idle + time.pipeline)
    own = {**settings, "prescaled_batch": False}
    assert seconds(PLAIN, "ml.p4d.24xlarge", 2, own, 8).operations == pytest.approx(
        3 * 8 * tokens * (PLAIN_FORWARD / 16 + 2 * 1000 * 512 / 16)
    )


def test_groups_of_a_host_share_its_network() -> None:
    """tp 8 inside a host, two replicas: 8 groups of two send an eighth of the layers each, all of it through one network."""
    settings = {**BF16, "tensor_parallel_degree": 8, "prescaled_batch": True}
    made = plan(PLAIN, "ml.p4d.24xlarge", 2, settings, 8)
    assert made.time is not None
    elements = made.worst.elements
    assert made.time.data == pytest.approx(2 * 1 / 2 * elements * 4 * 8 / 50e9)


def test_the_price_of_a_step() -> None:
    made = plan("gpt2", "ml.g5.xlarge", 1, BF16, 8)
    assert made.cost is not None
    assert made.cost.usd_per_step == pytest.approx(1.006 * 0.2001556 / 3600, rel=1e-6)
    assert made.cost.usd_per_million_tokens == pytest.approx(1.006 * 0.2001556 / 3600 / 8192 * 1e6, rel=1e-6)
    assert not made.cost.is_given
    two = plan("gpt2", "ml.p4d.24xlarge", 2, BF16, 8, prices={"ml.p4d.24xlarge": 36.0})
    assert two.cost is not None
    assert two.cost.is_given
    assert two.cost.usd_per_step == pytest.approx(2 * 36.0 * 0.0449067 / 3600, rel=1e-5)


def test_time_and_price_of_a_training() -> None:
    """5,000 samples in batches of 8 are 625 steps; those of one GPU at 1.006 USD take 0.2001556 s each."""
    made = plan("gpt2", "ml.g5.xlarge", 1, BF16, 8, samples=5000, epochs=3).training
    assert made is not None
    assert (made.steps, made.epochs, made.is_given) == (1875, 3, False)
    assert made.seconds == pytest.approx(1875 * 0.2001556, rel=1e-6)
    assert made.usd == pytest.approx(1.006 * 1875 * 0.2001556 / 3600, rel=1e-6)
    assert str(made).startswith("1,875 steps (3 epochs) of about 0.2 s: 6 minutes and 0.105 USD; starting")
    steps = plan("gpt2", "ml.g5.xlarge", 1, BF16, 8, samples=5000, steps=1000).training
    assert steps is not None
    assert (steps.steps, steps.epochs) == (1000, 1.6)
    assert steps.usd == pytest.approx(1.006 * 1000 * 0.2001556 / 3600, rel=1e-6)
    alone = plan("gpt2", "ml.g5.xlarge", 1, BF16, 8, steps=1).training
    assert alone is not None
    assert alone.epochs is None
    assert str(alone).startswith("1 step of about 0.2 s: 0.2 s and")
    assert plan("gpt2", "ml.g5.xlarge", 1, BF16, 8).training is None  # neither a data set nor steps
    assert plan("gpt2", "ml.g5.xlarge", 1, BF16, 8, samples=7).training is None  # less than a step


@pytest.mark.parametrize(
    ("step_seconds", "said"),
    [
        (0.01, "50 s and 0.3 USD"),
        (1.0, "83 minutes and 30.00 USD"),
        (18.0, "25.0 hours and 540.00 USD"),
        (720.0, "1,000.0 hours (41.7 days) and 21,600.00 USD"),
    ],
)
def test_a_step_that_was_measured_counts_instead_of_the_estimate(step_seconds: float, said: str) -> None:
    prices = {"ml.p4d.24xlarge": 10.8}
    made = plan("gpt2", "ml.p4d.24xlarge", 2, BF16, 8, steps=5000, step_seconds=step_seconds, prices=prices)
    assert made.training is not None
    assert f"as given: {said};" in str(made.training)
    assert made.training.seconds == 5000 * step_seconds
    assert made.cost is not None
    assert made.cost.usd_per_step == pytest.approx(2 * 10.8 * step_seconds / 3600)
    assert made.cost.usd_per_million_tokens == pytest.approx(made.cost.usd_per_step / made.batches.tokens * 1e6)
    assert made.time is not None
    assert made.time.total == pytest.approx(0.0449067, rel=1e-5)  # stays the estimate
    text = " ".join(str(made).split())
    assert f"a step takes {step_seconds:.3g} s, as given, {16 * 8 * 1024 / step_seconds:,.0f} tokens per second" in text
    assert f"training 5,000 steps of {step_seconds:.3g} s, as given: {said}" in text
    found = json.loads(json.dumps(made.to_dict()))["training"]
    assert (found["hours"], found["is_given"], found["epochs"]) == (5000 * step_seconds / 3600, True, None)
    assert found["usd"] == pytest.approx(2 * 10.8 * 5000 * step_seconds / 3600)


def test_a_measured_step_is_enough_where_nothing_can_be_estimated() -> None:
    cluster = {"processes_per_host": 8, "gpu_memory_bytes": 2**37}
    made = plan("gpt2", "ml.p9.48xlarge", 1, BF16, samples=800, step_seconds=2.0, **cluster)
    assert made.time is None
    assert made.training is not None
    assert (made.training.seconds, made.training.usd) == (200.0, None)
    assert "USD" not in str(made.training)
    text = " ".join(str(made).split())
    assert "the estimate: unknown: the type is not in the catalogue" in text
    assert "no price of ml.p9.48xlarge is known; give it with prices" in text
    priced = plan(
        "gpt2", "ml.p9.48xlarge", 1, BF16, samples=800, step_seconds=2.0, prices={"ml.p9.48xlarge": 90.0}, **cluster
    )
    assert priced.training is not None
    assert priced.training.usd == pytest.approx(5.0)


def test_a_measured_step_is_of_one_configuration() -> None:
    with pytest.raises(ConfigError, match=r"step_seconds is 1\.5; .* suggest\(\) compares many: give it to plan\(\)"):
        suggest("gpt2", "ml.g5.xlarge", 1, step_seconds=1.5)
    assert suggest("gpt2", "ml.g5.xlarge", 1, batch=1, steps=3600).plan.training is not None


def test_a_part_of_the_peak() -> None:
    half, all_of_it = (seconds("gpt2", "ml.g5.xlarge", 1, BF16, 8, utilisation=part) for part in (0.5, 1))
    assert half.total == pytest.approx(2 * all_of_it.total)
    assert plan("gpt2", "ml.g5.xlarge", 1, BF16, 8, utilisation=0.25).request.workload.utilisation == 0.25


def test_the_plan_says_what_it_assumes_and_whose_price_it_is() -> None:
    text = " ".join(str(plan("gpt2", "ml.p4d.24xlarge", 2, BF16, 1)).split())
    assert "a step takes about 0.0205 s" in text
    assert (
        "50% of the peak in bf16 (A100: 312 TFLOP/s), 300 GB/s between the GPUs of a host, 400 Gbit/s between" in text
    )
    assert (
        "2 × 21.9576 USD per hour (EC2 on demand, Linux, us-east-1, 2026-07-20; SageMaker bills a rate of its own)"
        in text
    )
    given = " ".join(str(plan("gpt2", "ml.g5.xlarge", prices={"ml.g5.xlarge": 2})).split())
    assert "1 × 2 USD per hour (as given)" in given
    found = json.loads(json.dumps(plan("gpt2", "ml.g5.xlarge", 1, BF16, 8).to_dict()))
    assert found["step_time"]["seconds"] == pytest.approx(0.2001556, rel=1e-6)
    assert found["step_cost"]["usd_per_hour_and_instance"] == 1.006


def test_the_example_of_the_page_is_what_a_plan_says() -> None:
    settings = {**BF16, "sharded_data_parallel_degree": 16}
    text = str(plan("gpt-neox-20b", "ml.p4d.24xlarge", 2, settings, 4, activation_checkpointing="each"))
    page = " ".join((Path(__file__).parents[2] / "docs" / "planning.md").read_text().split())
    said = " ".join(text.partition("time ")[2].partition("fewer GPUs")[0].split())
    assert said.startswith("a step takes about 8.94 s")
    assert f"time {said}" in page
    trained = plan("gpt2", "ml.p4d.24xlarge", batch=8, samples=5000, epochs=3).training
    assert f"training {trained}" in page


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("gpt2", "ml.g7.2xlarge"), "no peak of the RTX PRO 4500 in fp32 is published"),
        (("gpt2", "ml.p2.xlarge", 2), "no bandwidth of its network is published"),
        ((ModelShape(1, 1, 1, 1, 1), "ml.g5.xlarge"), "the model shows no layers or width"),
    ],
)
def test_what_is_not_known_is_said(arguments: tuple[Any, ...], why: str) -> None:
    made = plan(*arguments)
    assert made.time is None
    assert made.cost is None
    assert f"unknown: {why}" in " ".join(str(made).split())
    assert made.to_dict()["step_time"] is None


def test_a_price_that_nobody_knows() -> None:
    made = plan("gpt2", "ml.p5e.48xlarge")
    assert made.time is not None
    assert made.cost is None
    assert "no price of ml.p5e.48xlarge is known; give it with prices" in " ".join(str(made).split())
    assert plan("gpt2", "ml.p5e.48xlarge", prices={"ml.p5e.48xlarge": 60.0}).cost is not None
    # A type that the catalogue lacks may have a price, but no time.
    other = plan(
        "gpt2", "ml.p9.48xlarge", processes_per_host=8, gpu_memory_bytes=2**37, prices={"ml.p9.48xlarge": 99.0}
    )
    assert (other.time, other.cost) == (None, None)
    assert other.request.usd_per_hour == 99.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"utilisation": 0}, r"utilisation is 0; .* at most 1, for example 0\.5"),
        ({"utilisation": 45}, "utilisation is 45"),
        ({"utilisation": True}, "utilisation is True"),
        ({"step_seconds": 0}, "step_seconds is 0; .* give more than 0, or leave it out"),
        ({"step_seconds": float("inf")}, "step_seconds is inf"),
        ({"step_seconds": "1"}, "step_seconds is '1'"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"steps": 10, "epochs": 2, "samples": 64}, "steps is 10 and epochs is 2; .* give one of them"),
        ({"prices": {"ml.p4d.24xlarg": 1.0}}, r"prices has 'ml\.p4d\.24xlarg'.* did you mean 'ml\.p4d\.24xlarge'"),
        ({"prices": {"ml.p4d.24xlarge": 0}}, r"the price of ml\.p4d\.24xlarge is 0; .* US dollars per hour"),
        ({"prices": {"ml.p4d.24xlarge": "3"}}, r"is '3'"),
        ({"prices": 3.0}, "prices is 3.0, a float"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan("gpt2", "ml.p4d.24xlarge", **arguments)
