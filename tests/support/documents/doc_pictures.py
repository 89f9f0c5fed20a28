"""Draws the pictures of the documents, in ``docs/pictures``: ``python tests/support/documents/doc_pictures.py``.

Groups, partitions and timelines are drawn by what draws them in a notebook. Each is one file for both colour schemes: by itself it
takes the scheme of whoever looks, and ``docs/_site/pages.py`` puts it into the page, whose colour its texts then have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "pictures"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT), str(ROOT / "container")]

from smp_config import Topology  # noqa: E402 - the paths above lead to it, and to the next
from smp_estimator.figures.partition import Partition  # noqa: E402
from smp_estimator.figures.placement import Placement  # noqa: E402
from smp_estimator.figures.svg import box, legend, picture, text  # noqa: E402
from smp_estimator.timeline.steps import Block, RankStep, Step  # noqa: E402
from smp_runtime.pipeline.schedule.simulation import simulate  # noqa: E402
from support.documents import training_hours  # noqa: E402
from support.documents.flow_drawing import Box, Flow, Messages, path  # noqa: E402
from support.ranks.chains import orders, segments  # noqa: E402

BLUE, ORANGE, GREEN, PINK, GREY = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#8c8c8c"

#: Where a picture is shown without a page around it.
_SCHEMES = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"

FLOWS = {
    "overview": Flow(
        "One script, one call; where it runs is an argument",
        {
            "notebook": Box(0, 0, "a notebook|SMPEstimator(…).fit()|ModelTrainer(…).train()", BLUE),
            "shell": Box(0, 1, "a shell|smp-estimator run|smp-launch run", BLUE),
            "here": Box(1, 0, 'this machine, as processes|instance_type="local"|no GPU, Docker or account', ORANGE),
            "cloud": Box(1, 1, "a cluster|ml.p4d.24xlarge × n,|SLURM, Kubernetes, torchrun", ORANGE),
            "script": Box(2, 0.5, "your training script|smp.DistributedModel(…)|@smp.step", GREEN),
            "pp": Box(3, -0.12, "pipeline|stages", PINK),
            "tp": Box(3, 0.5, "tensor|parallel layers", PINK),
            "dp": Box(3, 1.12, "replicas,|or shards", PINK),
        },
        [
            ("notebook", "here", ""),
            ("notebook", "cloud", ""),
            ("shell", "here", ""),
            ("shell", "cloud", ""),
            ("here", "script", ""),
            *path("cloud", "script", "pp"),
            ("script", "tp", ""),
            ("script", "dp", ""),
        ],
    ),
    "choose": Flow(
        "From the top: the first answer that leads to the right is the strategy",
        {
            "a": Box(0, 0, "parameters, gradients and optimizer|state fit into one GPU?"),
            "b": Box(0, 1, "fit, if only the optimizer's|state is sharded?"),
            "c": Box(0, 2, "fit, if layers are computed again?"),
            "t": Box(0, 3, "fit, if layers are divided|inside a host?"),
            "p": Box(0, 4, "fit, if hosts have|different layers too?"),
            "d": Box(1, 0, "data parallelism|ddp", BLUE),
            "o": Box(1, 1, "sharded optimizer state|shard_optimizer_state", BLUE),
            "k": Box(1, 2, "activation checkpointing|set_activation_checkpointing", BLUE),
            "tensor": Box(1, 3, "tensor parallelism|tensor_parallel_degree", BLUE),
            "stages": Box(1, 4, "tensor × pipeline|pipeline_parallel_degree, microbatches", BLUE),
            "off": Box(0, 5, "activations offloaded, or|context parallelism", BLUE),
            "s": Box(1, 5, "or sharded data parallelism, if it is faster|sharded_data_parallel_degree", BLUE),
        },
        [
            ("a", "d", "yes"),
            ("a", "b", "no"),
            ("b", "o", "yes"),
            ("b", "c", "no"),
            ("c", "k", "yes"),
            ("c", "t", "no"),
            ("t", "tensor", "yes"),
            ("t", "p", "no"),
            ("p", "stages", "yes"),
            ("p", "off", "no"),
            ("stages", "s", "compare"),
            ("off", "s", "compare"),
        ],
    ),
    "data-parallelism": Flow(
        "Every rank has the whole model and a part of the batch",
        {
            "batch": Box(0, 1, "global batch", GREEN),
            "r0": Box(1, 0, "rank 0|whole model", BLUE),
            "r1": Box(1, 1, "rank 1|whole model", BLUE),
            "r2": Box(1, 2, "rank 2|whole model", BLUE),
            "mean": Box(2, 1, "gradients, averaged in buckets|while backward still runs", ORANGE),
            "update": Box(3, 1, "the same update|on every rank", GREEN),
        },
        [
            *(("batch", f"r{rank}", "") for rank in range(3)),
            *((f"r{rank}", "mean", "") for rank in range(3)),
            ("mean", "update", ""),
        ],
    ),
    "tensor-parallelism": Flow(
        "A pair of layers over two ranks: columns of the first, rows of the second, one sum",
        {
            "x": Box(0, 0.5, "x|on both ranks", GREEN),
            "a0": Box(1, 0, "rank 0: half of the columns,|half of the heads", BLUE),
            "a1": Box(1, 1, "rank 1: the other half", ORANGE),
            "b0": Box(2, 0, "rank 0: half of the rows", BLUE),
            "b1": Box(2, 1, "rank 1: the other half", ORANGE),
            "sum": Box(3, 0.5, "all-reduce", GREY),
            "y": Box(4, 0.5, "y|on both ranks", GREEN),
        },
        [
            ("x", "a0", ""),
            ("x", "a1", ""),
            ("a0", "b0", ""),
            ("a1", "b1", ""),
            ("b0", "sum", ""),
            *path("b1", "sum", "y"),
        ],
    ),
    "sharded-data-parallelism": Flow(
        "Two groups of two ranks: each group holds the whole state once",
        {
            "r0": Box(0, 0, "group 0, rank 0|shard 0", BLUE),
            "r1": Box(1, 0, "group 0, rank 1|shard 1", ORANGE),
            "r2": Box(0, 1.4, "group 1, rank 2|shard 0", BLUE),
            "r3": Box(1, 1.4, "group 1, rank 3|shard 1", ORANGE),
        },
        [
            ("r0", "r1", "all-gather of parameters, reduce-scatter of gradients"),
            ("r2", "r3", "the same"),
            ("r0", "r2", "all-reduce of a shard's gradients"),
            ("r1", "r3", "the same"),
        ],
        both_ways=True,
    ),
    "context-parallelism": Flow(
        "A sequence in four chunks on two ranks: causal work is equal",
        {
            "s": Box(0, 0, "the batch|chunks 0, 1, 2, 3", GREEN),
            "r0": Box(1, 0, "rank 0|chunks 0 and 3", BLUE),
            "r1": Box(1, 1.4, "rank 1|chunks 1 and 2", ORANGE),
        },
        [
            ("s", "r0", ""),
            ("s", "r1", ""),
            ("r0", "r1", "keys and values in attention"),
        ],
    ),
    "walk-call": Flow(
        "From fit() to the ranks",
        {
            "e": Box(0, 0, "estimator.py|mixin.py", BLUE),
            "r": Box(1, 0, "settings/|distribution.py", BLUE),
            "p": Box(2, 0, "smp_config/job.py|smp_config/parameters.py", GREEN),
            "t": Box(3, 0, "settings/|translation.py", BLUE),
            "c": Box(4, 0, "local/client.py|files/tree.py", BLUE),
            "l": Box(0, 1, "sagemaker/environment.py|leader.py, command.py", ORANGE),
            "k": Box(1, 1, "ranks/|rank.py", ORANGE),
            "s": Box(2, 1, "job/session.py", PINK),
            "j": Box(3, 1, "job/ranks.py", PINK),
            "m": Box(4, 1, "model/recipe.py", PINK),
        },
        [
            *path("e", "r", "p", "t", "c"),
            ("l", "k", "mpirun"),
            *path("k", "s", "j", "m"),
        ],
    ),
    "walk-gradient": Flow(
        "From a gradient to the optimizer",
        {
            "b": Box(0, 0, "model/backward.py", BLUE),
            "h": Box(1, 0, "sharding/|module_hooks.py", BLUE),
            "g": Box(2, 0, "sharding/|sharded_gradients.py", BLUE),
            "c": Box(3, 0, "comm/collectives.py", GREY),
            "w": Box(0, 1, "model/|gradient_accumulation.py", GREEN),
            "p": Box(2, 1, "sharding/|sharded_parameters.py", GREEN),
            "f": Box(0, 2, "sharding/flat_shards.py", ORANGE),
            "o": Box(1, 2, "parameters/|optimizer_shards.py", ORANGE),
            "m": Box(2, 2, "optim/|master_gradients.py", ORANGE),
            "d": Box(3, 2, "optim/|distributed_optimizer.py", ORANGE),
        },
        [
            *path("b", "h", "g"),
            ("g", "c", "reduce-scatter"),
            ("w", "p", ""),
            ("p", "c", "all-reduce"),
            *path("f", "o", "m", "d"),
        ],
    ),
    "walk-checkpoint": Flow(
        "From smp.save_checkpoint to files",
        {
            "f": Box(0, 0, "smdistributed/…/torch/|checkpoint.py", BLUE),
            "s": Box(1, 0, "checkpoint/|save_and_resume.py", BLUE),
            "p": Box(2, 0, "save_partial.py", BLUE),
            "t": Box(3, 0, "folder_transaction.py", GREEN),
            "r": Box(0, 1, "save_plan.py|live_state.py", ORANGE),
            "w": Box(1, 1, "files/atomic_file.py", ORANGE),
            "a": Box(2, 1, "rank_agreement.py", ORANGE),
            "m": Box(3, 1, "files/manifest.py", ORANGE),
        },
        [
            *path("f", "s", "p", "t"),
            *path("r", "w", "a", "m"),
            ("m", "t", "commit"),
        ],
    ),
}

CALL_OF_A_MODULE = Messages(
    "A microbatch through a remote stage",
    [
        "root_stage.py|(a task)",
        "remote_calls.py",
        "value_store.py",
        "messenger.py,|transport.py",
        "messenger.py of|the other stage",
        "module_server.py",
        "task_scheduler.py",
    ],
    [
        (0, 1, "module(x)"),
        (1, 2, "names the tensors"),
        (1, 3, "ForwardCall"),
        (3, 4, "bytes"),
        (4, 5, "its rank is in the step"),
        (5, 6, "a task"),
        (6, 5, "the baton"),
        (5, 3, "ValueMessage, by completion.py"),
        (3, 2, "the result"),
    ],
)

PLACEMENTS = {"placement": Placement(Topology(16, pipeline=2, tensor=4), 8)}

#: Of the table in `docs/how-it-works/pipeline-parallelism.md`, with its costs.
PARTITION = Partition(
    2,
    {
        "": 1,
        "transformer": 1,
        "transformer.wte": 1,
        "transformer.wpe": 0,
        "transformer.drop": 0,
        **{f"transformer.h.{layer}": layer // 2 for layer in range(4)},
        "transformer.ln_f": 1,
        "lm_head": 1,
    },
    {
        "transformer.wte": 1.7,
        "transformer.wpe": 0.7,
        "transformer.drop": 0.9,
        **{f"transformer.h.{layer}": 23.55 for layer in range(4)},
        "transformer.ln_f": 0.8,
        "lm_head": 1.6,
    },
    "cost",
)


def ideal_pipeline(stages: int, microbatches: int) -> Step:
    """1F1B with blocks of equal time, backward twice as long, as the runtime's simulator runs it; ms stand for units."""
    run = simulate(
        orders(stages, microbatches, stages),
        segments([0.01] * stages, [0.02] * stages, microbatches),
        active=stages,
    )
    ranks = []
    for rank in range(stages):
        blocks = tuple(
            Block(str(action), action.kind.value, action.microbatch, "", run.start[action], run.finish[action])
            for action in sorted(run.start, key=run.start.__getitem__)
            if action.path == (rank,)
        )
        ranks.append(RankStep(rank, rank, 0, "algo-1", 0.0, run.makespan, blocks))
    return Step(1, tuple(ranks))


def kept_activations() -> str:
    """What three layers keep for backward: plain, checkpointed and offloaded."""
    rows = [
        ("plain", "all that a layer computes waits in GPU memory for backward"),
        ("checkpointed", "a layer's input waits; backward runs the layer again"),
        ("offloaded", "inputs wait in CPU memory, and come back one layer ahead"),
    ]
    parts = []
    for number, (name, words) in enumerate(rows):
        y = 34 + 52 * number
        parts.append(text(4, y + 22, name))
        for layer in range(3):
            x = 96 + 124 * layer
            parts.append(box(x, y, 26, 34, GREY if number == 2 else BLUE, "input"))
            if number == 0:
                parts += [box(x + 28, y, 42, 34, ORANGE, "attention"), box(x + 72, y, 42, 34, GREEN, "MLP")]
        parts.append(text(476, y + 22, words, size=11))
    kinds = [(BLUE, "input, GPU"), (ORANGE, "attention"), (GREEN, "MLP"), (GREY, "input, CPU")]
    parts += legend(204, kinds, 96)
    return picture("What three layers keep between forward and backward", 216, parts, 830)


def pictures() -> Mapping[str, str]:
    """Every picture by the name of its file."""
    found = {name: flow.svg() for name, flow in FLOWS.items()}
    found |= {name: placement._repr_html_() for name, placement in PLACEMENTS.items()}
    found["walk-module"] = CALL_OF_A_MODULE.svg()
    found["activation-checkpointing"] = kept_activations()
    found["training-hours"] = training_hours.drawing()
    found["partition"] = PARTITION._repr_html_()
    found["pipeline-timeline"] = ideal_pipeline(4, 8)._repr_html_()
    return {f"{name}.svg": svg.replace("</title>", f"</title>{_SCHEMES}", 1) + "\n" for name, svg in found.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, svg in pictures().items():
        (FOLDER / file).write_text(svg, encoding="utf-8")
        print(FOLDER / file)
