"""Models beside the GPT of the other checks: layers of ``smp.nn``, and Transformers' Llama."""

from __future__ import annotations

from typing import Any

import torch

import smdistributed.modelparallel.torch as smp
from gpu_check import environment
from gpu_check.device import fuse_on_gpu, get_device, is_real, shut_down
from gpu_check.measurements import compare_times, count_kernels, measure_queueing, time_runs, to_ms
from gpu_check.models import MixedPrecision
from gpu_check.results import Finding, case, round_significant

_TINY_LAYERS = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
}
_LARGE_LAYERS = {
    "num_layers": 4,
    "num_attention_heads": 16,
    "attention_head_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 4096,
}
_WITHOUT_DROPOUT = {
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "pre_layernorm": True,
    "post_layernorm": False,
}
#: Parts of the names of kernels that attend.
_ATTENTION = ("flash", "fmha", "attention", "softmax", "cutlass")

_TINY_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_LARGE_LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
_VOCABULARY = 1024


def check_attention() -> None:
    """Measure the layers that tensor parallelism uses: with masks, rotary positions and linear biases."""
    size = _TINY_LAYERS if environment.is_tiny() else _LARGE_LAYERS
    head = size["attention_head_size"]
    frequencies = tuple(10000.0 ** (-2 * i / head) for i in range(head // 2))
    options: dict[str, dict[str, Any]] = {
        "causal, no mask": {},
        "causal, padding mask": {},
        "rotary": {"rotary_frequencies": frequencies},
        "linear biases": {"use_alibi": True},
        "in float32": {"attention_in_fp32": True},
    }
    for name, more in options.items():
        with case(f"smp.nn.DistributedTransformer: {name}") as finding:
            smp.init({"bf16": True, "ddp": True})
            _measure_layers(finding, {**size, **_WITHOUT_DROPOUT, **more}, has_mask=name == "causal, padding mask")
            shut_down()


def _measure_layers(finding: Finding, options: dict[str, Any], *, has_mask: bool) -> None:
    batch, seq = (2, 16) if environment.is_tiny() else (8, 1024)
    kind: dict[str, Any] = {"device": get_device(), "dtype": torch.bfloat16}
    torch.manual_seed(0)
    net = smp.nn.DistributedTransformer(causal_mask_size=seq, **options).to(get_device()).to(torch.bfloat16)
    x = torch.randn(batch, seq, options["hidden_size"], requires_grad=True, **kind)
    mask = torch.zeros(batch, 1, 1, seq, **kind) if has_mask else None

    def run() -> None:
        output = net((x, mask))
        output = output[0] if isinstance(output, tuple) else output
        output.float().square().mean().backward()

    run()
    run()
    finding["ms"] = to_ms(time_runs(run, 6, 0))
    finding |= measure_queueing(run)
    if is_real():
        finding["kernels"] = count_kernels(run, _ATTENTION, 3)


class Training:
    """A training of Transformers' Llama on one fixed batch; a call is a step.

    Attributes:
        losses: of each step.
    """

    def __init__(self, model: Any, optimizer: Any, step: Any) -> None:
        self._model, self._optimizer, self._step = model, optimizer, step
        self.losses: list[torch.Tensor] = []

    def __call__(self) -> None:
        self._optimizer.zero_grad()
        self.losses.append(self._step().detach())
        self._optimizer.step()


def _make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = _TINY_LLAMA if environment.is_tiny() else _LARGE_LLAMA
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, max_position_embeddings=512, use_cache=False, **size))


def _make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=fuse_on_gpu())


def _train_plain(ids: torch.Tensor) -> Training:
    model = _make_llama().to(get_device())
    optimizer = MixedPrecision(model, _make_optimizer, torch.bfloat16)

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    return Training(model, optimizer, step)


def _train_wrapped(ids: torch.Tensor) -> Training:
    model = smp.DistributedModel(_make_llama())
    optimizer = smp.DistributedOptimizer(_make_optimizer(model.parameters()))

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids)["loss"]
        model.backward(loss)
        return loss

    return Training(model, optimizer, lambda: step(ids).reduce_mean())


def check_hf() -> None:
    """Compare time and losses of a Llama with and without the library."""
    size = (2, 16) if environment.is_tiny() else (8, 512)
    ids = torch.randint(0, _VOCABULARY, size, generator=torch.Generator().manual_seed(1)).to(get_device())
    with case("Llama, bf16") as finding:
        peer = _train_plain(ids)
        smp.init({"bf16": True})
        ours = _train_wrapped(ids)
        finding |= compare_times(ours, peer, 8)
        pairs = zip(ours.losses, peer.losses, strict=False)  # ours has taken its first steps alone
        apart = max(abs(float(mine) - float(theirs)) / abs(float(theirs)) for mine, theirs in pairs)
        finding["loss_rel"] = round_significant(apart)
        finding["ok"] = apart < 2e-2
        finding |= measure_queueing(ours)
        shut_down()
