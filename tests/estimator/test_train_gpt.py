"""The example script: evaluation, which may be turned off, and tensor parallelism."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest


def test_no_batches_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "entrypoints"))
    import train_gpt

    model: Any = Namespace(eval=lambda: None, train=lambda: None)
    nothing: Any = None
    assert train_gpt.evaluate(model, nothing, Namespace(eval_batches=0), nothing) is None
    assert train_gpt.shown(None) == "none"
    assert train_gpt.shown(1.0) == "1.0000"
    sys.modules.pop("train_gpt")


def _trained(folder: str, *more: str) -> tuple[int, int, list[float]]:
    """Distributed modules, trained elements on this rank, and the losses of a short run."""
    import json
    import signal
    import sys

    entrypoints = next(path for path in sys.path if path.endswith("entrypoints"))
    import train_gpt

    import smdistributed.modelparallel.torch as smp

    assert train_gpt.__file__.startswith(entrypoints)
    made = []
    original = train_gpt.make_model

    def kept(config: Any) -> Any:
        made.append(original(config))
        return made[0]

    train_gpt.make_model = kept
    sizes = ["--layers=1", "--hidden=16", "--heads=2", "--seq_len=8", "--sample_bytes=0", "--checkpoint_interval=0"]
    own = ["--steps=2", "--batch_size=3", "--log_losses=1", "--eval_batches=1", f"--train={folder}/text"]
    sys.argv = ["train_gpt.py", *sizes, *own, f"--model_dir={folder}/model", f"--checkpoint_dir={folder}/none", *more]
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert train_gpt.main() == 0
    finally:
        signal.signal(signal.SIGTERM, before)
        train_gpt.make_model = original
    smp.barrier()
    losses = json.loads(Path(folder, "model", "losses.json").read_text())
    return sum(1 for _ in made[0].distributed_modules()), sum(p.numel() for p in made[0].parameters()), losses


def test_tensor_parallelism_shares_the_blocks_and_reads_one_batch_per_group(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "words.txt").write_bytes(bytes(range(97, 123)) * 40)

    def run(folder: str, entrypoints: str, *more: str) -> tuple[int, int, list[float]]:
        sys.path.insert(0, entrypoints)
        try:
            return _trained(folder, *more)
        finally:
            sys.path.remove(entrypoints)

    where = (str(tmp_path), str(Path(__file__).parents[2] / "entrypoints"))
    ((none, whole, _),) = ranks(run, 1, *where, config={})
    shared = ranks(run, 2, *where, config={"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})
    assert none == 0
    for count, elements, losses in shared:
        assert count == 4  # an odd batch is right, too: both ranks read it
        assert elements < whole
        assert len(losses) == 2
    # Muon takes another way, and the same one where the matrices are cut.
    ((_, _, alone),) = ranks(run, 1, *where, "--optimizer=muon", config={})
    for _, _, losses in ranks(
        run, 2, *where, "--optimizer=muon", config={"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True}
    ):
        assert losses[0] == shared[0][2][0]
        assert losses[1] != shared[0][2][1]
        assert losses == pytest.approx(alone, rel=1e-3)  # bfloat16 rounds other digits of float32 gradients
