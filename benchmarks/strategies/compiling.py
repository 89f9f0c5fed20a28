"""``"compile": true`` against eager blocks: what is gained, how much of one process's gain is kept, and what compiling costs.

    python benchmarks/strategies/compiling.py                  # one process, then two ranks: pipeline, sharded, tensor parallel
    python benchmarks/strategies/compiling.py --case "tp 2" --rounds 8

A model of ``smp.nn.DistributedTransformerLayer`` as Llama's are (root mean square norms, rotary embedding, gated output layers) in
float32 trains with AdamW. In the same processes steps run with compiled blocks and eagerly, in turns A B A B …; the gain is the
median of the ratios of neighbours, and what is kept of it the part of the step's time that is spared, over the part that is spared
in one process. Each case begins with an empty folder of compiled code and is then started a second time with the folder that the
first has left: ``first_s`` and ``second_s`` are the seconds that PyTorch counts for tracing, compiling and loading, of the rank
that took longest, waiting for the other included. A result on CPU with gloo says nothing about NCCL and Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import print_machine, run_ranks

CASES = {
    "one process": (1, {}),
    "pp 2": (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    "sdp 2": (2, {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}),
    "tp 2": (2, {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "optimize": "speed"}),
}
VOCABULARY = 512


def run_rank(case: str, rounds: int, layers: int, hidden: int, seq: int, batch: int, dropout: float, note: str) -> None:
    """Run compiled and eager steps in turns on one rank."""
    import torch
    from torch import nn
    from torch._dynamo.utils import compilation_time_metrics, counters

    torch.set_num_threads(1)
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.microbatch_state.compiled_blocks import run_eagerly

    _, degrees = CASES[case]
    smp.init({**degrees, "compile": True})
    torch.manual_seed(0)

    pairs = hidden // 8  # of channels of a head
    frequencies = tuple(10000.0 ** (-i / pairs) for i in range(pairs))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.places = nn.Embedding(VOCABULARY, hidden), nn.Embedding(seq, hidden)
            self.layers = nn.ModuleList(
                smp.nn.DistributedTransformerLayer(
                    num_attention_heads=4,
                    attention_head_size=hidden // 4,
                    hidden_size=hidden,
                    intermediate_size=3 * hidden,
                    activation="silu",
                    rms_norm=True,
                    gated_mlp=True,
                    use_qkv_bias=False,
                    use_attn_dense_bias=False,
                    use_mlp_bias=False,
                    rotary_frequencies=frequencies,
                    rotary_interleaved=False,
                    causal_mask_size=seq,
                    attention_dropout_prob=0.0,
                    hidden_dropout_prob=dropout,
                    pre_layernorm=True,
                    post_layernorm=False,
                )
                for _ in range(layers)
            )
            self.head = nn.Linear(hidden, VOCABULARY)

        def forward(self, ids):
            x = self.embedding(ids) + self.places.weight
            for layer in self.layers:
                x = layer((x, None))[0]
            return self.head(x)

    model = smp.DistributedModel(GPT())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

    @smp.step
    def train(ids):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        model.backward(loss)
        return loss

    ranks = smp.rdp_size()
    ids = torch.randint(VOCABULARY, (batch // ranks, seq))

    def step() -> float:
        smp.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        train(ids)
        optimizer.step()
        smp.barrier()
        return time.perf_counter() - start

    counters.clear()
    for _ in range(3):
        step()
    graphs = counters["stats"]["unique_graphs"]
    with run_eagerly():
        step(), step()
    compiled, eager = [], []
    for _ in range(rounds):
        compiled.append(step())
        with run_eagerly():
            eager.append(step())
    found = [
        sum(compilation_time_metrics.get("_compile.compile_inner", ())),
        graphs,
        counters["stats"]["unique_graphs"] - graphs,
        sum(counters["graph_break"].values()),
    ]
    every = smp.allgather(found, smp.WORLD)
    if smp.rank() == 0:
        ratios = [a / b for a, b in zip(eager, compiled, strict=True)]
        line = {
            "case": case,
            "ranks": smp.size(),
            "eager_ms": round(1e3 * statistics.median(eager), 1),
            "compiled_ms": round(1e3 * statistics.median(compiled), 1),
            "gain": round(statistics.median(ratios), 3),
            "gain_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
            "compile_s": round(max(seconds for seconds, *_ in every), 2),
            "graphs": max(graphs for _, graphs, *_ in every),
            "recompilations": max(later for *_, later, _ in every),
            "graph_breaks": max(breaks for *_, breaks in every),
        }
        Path(note).write_text(json.dumps(line))
    smp.shutdown()


def measured(case: str, words: list[object], folder: str) -> dict:
    """Measure one job of a case; its compiler keeps its results in ``folder``."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    note = Path(folder) / "line.json"
    run_ranks(__file__, CASES[case][0], ["--rank-of", case, "--note", note, *words])
    return json.loads(note.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", choices=CASES, action="append", help="default: all; what is kept needs one process too"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rank-of", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--note", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in ("rounds", "layers", "hidden", "seq", "batch", "dropout")}
    if args.rank_of:
        run_rank(args.rank_of, **sizes, note=args.note)
        return
    print_machine()
    words: list[object] = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    alone = None
    for case in args.case or CASES:
        with tempfile.TemporaryDirectory() as folder:
            line = measured(case, words, folder)
            second = measured(case, [*words, "--rounds", 2], folder)
        line["first_s"], line["second_s"] = line.pop("compile_s"), second["compile_s"]
        line["second_over_first"] = round(line["second_s"] / line["first_s"], 3)
        spared = 1 - 1 / line["gain"]
        if case == "one process":
            alone = spared
        elif alone is not None:
            line["kept"] = round(spared / alone, 2)
            line["lost"] = round(1 - line["kept"], 2)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
