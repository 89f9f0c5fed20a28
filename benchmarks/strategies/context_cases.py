"""Compare context parallelism with one process: this library's, PyTorch's ``context_parallel`` and Accelerate's.

    python benchmarks/strategies/context_cases.py                       # all cases on two ranks
    python benchmarks/strategies/context_cases.py --case "sliding window" --case "packed documents"

Each case is a small model on one batch. One process trains one step by SGD; then each library does, on two ranks that share the
sequences out. A case is *equal* if the loss and the change of the weights are within 1e-4 of one process's, *refused* if an error
ends it, and *wrong* otherwise: then the numbers say how far off loss and change are. The peer is given what it asks for: tensors
are cut as buffers, masks by row, gradients averaged, and its balance is off if it asks for that.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launching import print_machine, run_ranks
from torch import nn

RANKS = 2
TOKENS, HIDDEN, HEADS, BATCH = 32, 16, 4, 2
EQUAL = 1e-4
IGNORED = -100


class Net(nn.Module):
    """Attend between two projections, with the mask or mixer of a case."""

    def __init__(self, key_heads: int = HEADS, value_width: int = HIDDEN // HEADS, **options: Any) -> None:
        super().__init__()
        width = HIDDEN // HEADS
        self.key_heads, self.value_width = key_heads, value_width
        self.options = options
        self.query = nn.Linear(HIDDEN, HEADS * width)
        self.key = nn.Linear(HIDDEN, key_heads * width)
        self.value = nn.Linear(HIDDEN, key_heads * value_width)
        self.out = nn.Linear(HEADS * value_width, HIDDEN)
        self.places = nn.Embedding(TOKENS, HIDDEN) if options.get("positions") else None
        self.convolution = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1) if options.get("convolution") else None

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> Any:
        if self.places is not None:
            x = x + self.places(torch.arange(x.shape[1]))
        if self.convolution is not None:
            x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        keys = x if memory is None else memory
        q = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = self.key(keys).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        v = self.value(keys).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        more = {"enable_gqa": True} if self.key_heads != HEADS else {}
        is_causal = mask is None and memory is None and self.options.get("causal", True)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, **more)
        y = self.out(y.transpose(1, 2).flatten(2))
        return y.mean(1) if self.options.get("pooled") else y


def loss_of(out: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
    """Return the loss of a small model: cross-entropy if it has targets."""
    return out.square().mean() if targets is None else F.cross_entropy(out.flatten(0, 1), targets.flatten())


def rows_and_keys(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of queries and of keys, as a column and a row."""
    places = torch.arange(tokens)
    return places[:, None], places[None]


def sliding_window() -> torch.Tensor:
    rows, keys = rows_and_keys()
    return (keys <= rows) & (keys > rows - 6)


def documents() -> torch.Tensor:
    rows, keys = rows_and_keys()
    starts = torch.tensor([0, 5, 18])
    of_row, of_key = (torch.bucketize(each, starts, right=True) for each in (rows, keys))
    return (keys <= rows) & (of_row == of_key)


def padding() -> torch.Tensor:
    held = torch.arange(TOKENS)[None] < torch.tensor([[TOKENS], [TOKENS - 9]])
    return held[:, None, None]


def alibi() -> torch.Tensor:
    rows, keys = rows_and_keys()
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]
    bias = -(rows - keys).abs() * slopes
    return bias.masked_fill(keys > rows, -torch.inf)[None]


#: Options of the model, the mask, and what else the batch has.
SMALL: dict[str, tuple[dict[str, Any], Callable[[], torch.Tensor] | None, dict[str, Any]]] = {
    "causal": ({}, None, {}),
    "bidirectional": ({"causal": False}, None, {}),
    "padding mask": ({}, padding, {}),
    "sliding window": ({}, sliding_window, {}),
    "packed documents": ({}, documents, {}),
    "additive bias (ALiBi)": ({}, alibi, {}),
    "grouped queries": ({"key_heads": 2}, None, {}),
    "values wider than keys": ({"value_width": 8}, None, {}),
    "cross-attention, other length": ({}, None, {"memory": 48}),
    "length that 2c does not divide": ({}, None, {"tokens": TOKENS - 2}),
    "positions made in the model": ({"positions": True}, None, {}),
    "mean over the tokens": ({"pooled": True}, None, {}),
    "convolution over the tokens": ({"convolution": True}, None, {}),
    "targets ignored, unevenly": ({}, None, {"targets": True}),
}
#: Models of Transformers.
LARGE = (
    "Llama",
    "Llama, padded right",
    "Llama, padded left",
    "Llama, packed by position_ids",
    "Mistral with a sliding window",
)


def small_batch(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return features, the other sequence, and targets."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH, given.get("tokens", TOKENS), HIDDEN, generator=draw)
    memory = torch.randn(BATCH, given["memory"], HIDDEN, generator=draw) if "memory" in given else None
    if "targets" not in given:
        return x, memory, None
    targets = torch.randint(HIDDEN, x.shape[:2], generator=draw)
    targets[:, : TOKENS // 4] = IGNORED
    return x, memory, targets


def large(case: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model of Transformers and its batch; its labels are shifted."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    if case.startswith("Mistral"):
        model: nn.Module = MistralForCausalLM(MistralConfig(**sizes, sliding_window=6))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    ids = torch.randint(1, 64, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2))
    places = torch.arange(TOKENS)[None].repeat(BATCH, 1)
    targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
    batch = {"input_ids": ids, "position_ids": places, "shift_labels": targets}
    if "padded" in case:
        held = torch.ones(BATCH, TOKENS, dtype=torch.long)
        held[1, -9:] = 0
        targets[1, -10:] = IGNORED
        if "left" in case:
            held, targets[1] = held.flip(1), F.pad(ids[1, 1:], (0, 1), value=IGNORED)
            targets[1, :9] = IGNORED
            batch["position_ids"] = (held.cumsum(1) - 1).clamp(min=0)
        batch["attention_mask"] = held
    if "packed" in case:
        batch["position_ids"] = torch.cat([torch.arange(12), torch.arange(20)])[None].repeat(BATCH, 1)
        targets[:, 11] = IGNORED
    return model, batch


def large_loss(model: nn.Module, batch: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """Return the sum of these tokens' losses, divided by the number of all targets."""
    inputs = {name: value for name, value in batch.items() if name != "shift_labels"}
    logits = model(**inputs).logits
    total = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
    return total / count


def prepared(case: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a case's model, and a function for the loss on its whole batch."""
    if case in LARGE:
        model, batch = large(case)
        count = int((batch["shift_labels"] != IGNORED).sum())
        return model, lambda each: large_loss(each, batch, count)
    options, mask, given = SMALL[case]
    torch.manual_seed(1)
    x, memory, targets = small_batch(given)
    more = {"memory": memory, "mask": mask and mask()}
    more = {name: value for name, value in more.items() if value is not None}
    return Net(**options), lambda each: loss_of(each(x, **more), targets)


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def one_process(case: str) -> tuple[float, torch.Tensor]:
    """Return the loss and the change of the weights."""
    model, whole_loss = prepared(case)
    before = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = whole_loss(model)
    loss.backward()
    optimizer.step()
    return float(loss.detach()), weights_of(model) - before


def ours(case: str) -> tuple[float, torch.Tensor]:
    """Run a case with this library; model and loss are those of one process."""
    import smdistributed.modelparallel.torch as smp

    plain, whole_loss = prepared(case)
    before = weights_of(plain)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step() -> Any:
        loss = whole_loss(model)
        model.backward(loss)
        return loss

    loss = float(step().reduce_mean())
    optimizer.step()
    return loss, weights_of(model) - before


def peer_loss(case: str, model: nn.Module, mesh: Any) -> tuple[torch.Tensor, Any]:
    """Return this rank's loss and the context for backward; the ranks' losses add up to the batch's."""
    from context_peers import cut

    stack = contextlib.ExitStack()
    if case in LARGE:
        _, batch = large(case)
        count = int((batch["shift_labels"] != IGNORED).sum())
        kept = {name: value.clone() for name, value in batch.items()}
        stack.enter_context(cut(mesh, *(kept[name] for name in kept if name != "attention_mask")))
        return large_loss(model, kept, count), stack
    _, mask, given = SMALL[case]
    x, memory, targets = small_batch(given)
    buffers, dims = [x], [1]
    for each in (memory, targets):
        if each is not None:
            buffers.append(each)
            dims.append(1)
    made = None
    if mask is not None:
        made = mask()
        # The prototype takes any mask for one of four dims, with a row per query.
        made = made[(None,) * (4 - made.dim())]
        made = made.expand(-1, -1, x.shape[1], -1).clone()
        buffers.append(made)
        dims.append(made.dim() - 2)
    stack.enter_context(cut(mesh, *buffers, dims=tuple(dims)))
    more = {name: value for name, value in (("memory", memory), ("mask", made)) if value is not None}
    return loss_of(model(x, **more), targets) / RANKS, stack


def theirs(case: str, mesh: Any, *, accelerate: bool) -> tuple[float, torch.Tensor]:
    """Run the same with PyTorch's context manager, and with the hooks of Accelerate around it."""
    from context_peers import as_accelerate

    model, _ = prepared(case)
    model = as_accelerate(copy.deepcopy(model)) if accelerate else model
    before = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss, stack = peer_loss(case, model, mesh)
    with stack:
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    return float(total), weights_of(model) - before


def verdict(run: Callable[[], tuple[float, torch.Tensor]], expected: tuple[float, torch.Tensor]) -> str:
    """Compare a run with one process; the ranks run the same program, so all of them fail or none."""
    try:
        loss, change = run()
    except Exception as error:
        told = str(error).strip().splitlines() or [""]
        return f"refused: {type(error).__name__}: {told[0][:160]}"
    of_loss = abs(loss - expected[0]) / abs(expected[0])
    of_change = float((change - expected[1]).norm() / expected[1].norm())
    if max(of_loss, of_change) <= EQUAL:
        return "equal"
    return f"wrong: loss off by {of_loss:.1%}, change of the weights by {of_change:.0%}"


def peer_verdict(case: str, mesh: Any, expected: tuple[float, torch.Tensor], *, accelerate: bool) -> str:
    """Compare the peer's run, without its load balancing if the case asks for that."""
    from context_peers import prototype

    def run() -> tuple[float, torch.Tensor]:
        return theirs(case, mesh, accelerate=accelerate)

    prototype._cp_options.enable_load_balance = True
    found = verdict(run, expected)
    if "oad balanc" not in found:
        return found
    prototype._cp_options.enable_load_balance = False
    return f"{verdict(run, expected)} (balance off)"


def run_rank(case: str) -> None:
    """Run one process, this library and the peers on one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    from context_peers import install

    import smdistributed.modelparallel.torch as smp

    smp.init({"ddp": True, "context_parallel_degree": RANKS, "host_collectives": False})
    expected = one_process(case)
    line = {"case": case, "ours": verdict(lambda: ours(case), expected)}
    install("all_gather")
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    line["context_parallel"] = peer_verdict(case, mesh, expected, accelerate=False)
    if case in LARGE:
        line["accelerate"] = peer_verdict(case, mesh, expected, accelerate=True)
    if smp.rank() == 0:
        print(json.dumps(line), flush=True)
    smp.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*SMALL, *LARGE], action="append", help="default: all")
    parser.add_argument("--rank-of", choices=[*SMALL, *LARGE], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of)
        return
    print_machine()
    for case in args.case or [*SMALL, *LARGE]:
        run_ranks(__file__, RANKS, ["--rank-of", case])


if __name__ == "__main__":
    main()
