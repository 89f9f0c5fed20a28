"""The benchmarks that ``bench.py`` runs, with the columns of their tables and what they aim at."""

from __future__ import annotations

from results import Column, Suite

CASE, RANKS, PEER = Column("case", "case"), Column("ranks", "ranks"), Column("peer", "peer")
TRANSPORT = Column("ours over", "transport")
RATIO = Column("time ÷ peer's (quartiles)", "{time_ratio:.2f} ({ratio_quartiles[0]:.2f}–{ratio_quartiles[1]:.2f})")
STEPS = Column("step, ms (ours, peer)", "{ours_ms:.1f}, {peer_ms:.1f}")
BYTES = Column("bytes ÷ bound", "{bytes_over_bound:.3f}")
TURNS = (CASE, RANKS, PEER, TRANSPORT, RATIO, STEPS, BYTES)

#: Of the page's table of pipelines.
_STAGES = (
    *("sleep", "sleep-last", "sleep-zero", "sleep-zero-last", "sleep-torch", "sleep-torch-zbv"),
    *("torch", "torch-zero", "live"),
)


def _cases(*names: str, rounds: int) -> tuple[str, ...]:
    """Return the words that ask for some cases."""
    return (*(word for name in names for word in ("--case", name)), "--rounds", str(rounds))


SUITES = (
    Suite(
        "data-parallel",
        "Data parallelism and sharded optimizer state",
        "strategies/data_parallel.py",
        ("--rounds", "16"),
        ("--rounds", "3"),
        TURNS,
        {"ddp": ("time_ratio", 0.97), "zero": ("time_ratio", 0.85)},
    ),
    Suite(
        "sharded",
        "Sharded data parallelism",
        "strategies/sharded_data_parallel.py",
        ("--rounds", "12"),
        ("--case", "2", "--rounds", "5"),
        TURNS,
        dict.fromkeys(("2", "4", "2x2"), ("time_ratio", 0.75)),
    ),
    Suite("tensor-parallel", "Tensor parallelism", "strategies/tensor_parallel.py", (), ("--rounds", "20"), TURNS, {}),
    Suite(
        "tp-plan",
        "Tensor parallelism of whole models",
        "strategies/transformers_plans.py",
        (),
        None,
        (*TURNS, Column("bytes ÷ peer's", "{bytes_ratio:.3f}")),
        {},
        python=".venv-clients-5/bin/python",
    ),
    Suite(
        "context-parallel",
        "Context parallelism",
        "strategies/context_parallel.py",
        ("--rounds", "8"),
        ("--case", "2 ring", "--rounds", "3", "--tokens", "512"),
        (
            *TURNS,
            Column("peer's bytes ÷ bound", "{peer_bytes_over_bound:.3f}"),
            Column(
                "kept for backward ÷ 1/c of one process (ours, peer)",
                "{kept_over_share:.3f}, {peer_kept_over_share:.3f}",
            ),
            Column("loss − one process's (ours, peer)", "{loss_difference:.0e}, {peer_loss_difference:.0e}"),
        ),
        {},
    ),
    Suite(
        "pipeline",
        "Pipeline parallelism",
        "strategies/pipeline.py",
        _cases(*_STAGES, rounds=8),
        _cases("sleep", "sleep-zero-last", "torch", rounds=3),
        (
            CASE,
            RANKS,
            PEER,
            RATIO,
            STEPS,
            BYTES,
            Column("makespan ÷ closed form of 1F1B (best step)", "{makespan_over_closed_form:.3f} ({best:.3f})"),
            Column("idle ÷ 1F1B's", "{idle_over_1f1b:.2f}"),
            Column("most held ÷ interleaved's", "{peak_over_interleaved:.2f}"),
        ),
        {
            **dict.fromkeys(("sleep", "sleep-last"), ("makespan_over_closed_form", 1.02)),
            **dict.fromkeys(("sleep-zero", "sleep-zero-last"), ("idle_over_1f1b", 0.45)),
            "live": ("peak_over_interleaved", 1.05),
            **dict.fromkeys(("torch", "torch-zero"), ("time_ratio", 0.97)),
        },
    ),
    Suite(
        "checkpointing",
        "Activation checkpointing and offloading",
        "strategies/activation_checkpointing.py",
        (),
        ("--rounds", "3", "--strategy", "each", "--horizon", "2"),
        (
            Column("strategy or horizon", "case"),
            Column("time ÷ no checkpointing (quartiles)", RATIO.text),
            Column("bytes ÷ no checkpointing", "{bytes_over_none:.2f}"),
            Column("bytes ÷ formula", "{bytes_over_formula:.3f}"),
            Column("regions resident at most", "{peak_regions:.2f}"),
        ),
        {},
    ),
    Suite(
        "checkpoints",
        "Checkpoints",
        "long_jobs/checkpoints.py",
        (),
        ("--rounds", "2", "--layers", "8"),
        (
            CASE,
            RANKS,
            PEER,
            RATIO,
            Column("seconds (ours, peer)", "{ours_s:.3f}, {peer_s:.3f}"),
            Column("÷ hashing and writing a plain file", "{over_plain_file:.2f}"),
            Column("stall ÷ a synchronous save", "{over_sync:.3f}"),
            Column("peak ÷ bound", "{peak_over_bound:.2f}"),
        ),
        {"save": ("time_ratio", 0.7), "reshard": ("time_ratio", 0.7), "async stall": ("over_sync", 0.04)},
    ),
    Suite(
        "compiling",
        "Compiled blocks",
        "strategies/compiling.py",
        (),
        None,
        (
            CASE,
            RANKS,
            Column("eager ÷ compiled (quartiles)", "{gain:.2f} ({gain_quartiles[0]:.2f}–{gain_quartiles[1]:.2f})"),
            Column("step, ms (eager, compiled)", "{eager_ms:.1f}, {compiled_ms:.1f}"),
            Column("of the gain kept (lost)", "{kept:.2f} ({lost:.2f})"),
            Column("graphs; later; breaks", "{graphs}; {recompilations}; {graph_breaks}"),
            Column("compiling, s (first job, second)", "{first_s:.1f}, {second_s:.1f}"),
            Column("second ÷ first", "{second_over_first:.2f}"),
        ),
        {
            "one process": ("second_over_first", 0.2),
            **dict.fromkeys(("pp 2", "sdp 2", "tp 2"), ("lost", 0.1)),
        },
    ),
    Suite(
        "starting",
        "Starting",
        "long_jobs/starting.py",
        ("--rounds", "7"),
        ("--rounds", "2"),
        (
            CASE,
            PEER,
            RATIO,
            Column("seconds (ours, peer)", "{ours_s:.2f}, {peer_s:.2f}"),
            Column("seconds", "{seconds:.2f}"),
        ),
        {"import": ("time_ratio", 1.1), "fit() to the first step, warm": ("seconds", 5.0)},
    ),
    Suite(
        "scaling",
        "Scaling, counted",
        "strategies/scaling.py",
        (),
        None,
        (
            Column("scaling", "scaling"),
            Column("strategy", "case"),
            RANKS,
            Column("bytes that a rank sends, MB", "{sent_MB:.1f}"),
            Column("÷ bound", "{bytes_over_bound:.3f}"),
            Column("peak, MB", "{peak_MB:.1f}"),
            Column("FLOPs of a rank ÷ of one alone", "{flops_share:.4f}"),
            Column("rehearsed step, ms", "{step_ms:.2f}"),
        ),
        {},
    ),
)
