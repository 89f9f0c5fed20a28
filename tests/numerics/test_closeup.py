"""Two whole tensors side by side: which elements differ, whose share they are, and how they differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults.numerics_faults import FAULTS
from support.platform.command_line import call, flat
from support.training.numerics_training import DEGREES
from support.training.recorded_steps import HEAD, STEP, changed

from smp_config import ConfigError
from smp_estimator.numerics.bisection import Bisection, Saved
from smp_estimator.numerics.comparison import compare
from smp_estimator.numerics.recorded_run import RecordedRun, TensorKey
from smp_estimator.numerics.tensor_diff import (
    CloseupFiles,
    RunNames,
    WholeTensor,
    describe_differences,
    order_of_samples,
)
from smp_records.numerics import Closeup, Head, KeptTensor, RecordedMoment, Start

SPLIT = [
    replace(HEAD, rank=rank, world=2, degrees={**HEAD.degrees, "tp": 2}, place={"pp": 0, "tp": rank, "rdp": 0})
    for rank in (0, 1)
]
WEIGHT, RESULT = TensorKey("weight", "a.weight", 0), TensorKey("output", "a", 0)
VALUES = np.random.default_rng(0).standard_normal((6, 128))


def _told(
    other: WholeTensor, one: WholeTensor | None = None, key: TensorKey = WEIGHT, heads: Sequence[Head] = (HEAD,)
) -> str:
    one = one or WholeTensor(VALUES, "float32")
    return "\n".join(describe_differences(one, other, key, 1e-6, ([HEAD], heads), RunNames("A", "B")))


def _changed(where: Any, factor: float = 2.0) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = VALUES.copy()
    values[where] *= factor
    return values


def test_columns_are_the_share_of_a_tensor_parallel_rank() -> None:
    places = np.arange(VALUES.size).reshape(VALUES.shape)
    shares = {0: places[:, :64].reshape(-1), 1: places[:, 64:].reshape(-1)}
    said = _told(WholeTensor(_changed(np.s_[:, 64:]), "float32", shares), heads=SPLIT)
    a = VALUES[0, 64]
    assert said.splitlines() == [
        f"384 of 768 elements of [6, 128] differ; the first is [0, 64]: {a:.9g} in A, {2 * a:.9g} in B; the greatest difference is "
        + said.splitlines()[0].rpartition("difference is ")[2],
        "only columns 64–127 of 128 along axis 1 differ, the share of tp rank 1",
        "each is 2 times as great in B",
    ]
    part = _told(WholeTensor(_changed(np.s_[2, 70:72]), "float32", shares), heads=SPLIT)
    assert "only rows 2 of 6 along axis 0 differ" in part
    assert "only columns 70–71 of 128 along axis 1 differ, in the share of tp rank 1" in part


def test_shards_of_the_flattened_tensor() -> None:
    flat_places = np.arange(VALUES.size)
    shares = {0: flat_places[:500], 1: flat_places[500:]}
    values = VALUES.copy()
    values.reshape(-1)[500:] = 0.0
    said = _told(WholeTensor(values, "float32", shares), heads=[HEAD, replace(HEAD, rank=1)])
    assert "all of them are in the shards of rank(s) 1" in said
    assert "all of them are 0 in B" in said


def test_heads_of_attention() -> None:
    said = _told(WholeTensor(_changed(np.s_[:, 32:64]), "float32", heads=4))
    assert "only columns 32–63 of 128 along axis 1 differ, head(s) 1 of 4" in said
    one = WholeTensor(np.tile(VALUES, (1, 3)), "float32", heads=4)
    values = one.values.copy()
    values[:, 128 + 96 : 256] += 1.0
    assert "head(s) 3 of 4 of keys" in _told(WholeTensor(values, "float32", heads=4), one)


def test_samples_belong_to_microbatches_and_replicas() -> None:
    pieces = [(0, 0, 2), (0, 1, 1), (1, 0, 2), (1, 1, 1)]
    said = _told(
        WholeTensor(_changed(np.s_[5:]), "float32", pieces=pieces),
        WholeTensor(VALUES, "float32", pieces=[(0, 0, 6)]),
        RESULT,
    )
    assert "only samples 5 of 6 along axis 0 differ, microbatch(es) 1 of replica(s) 1" in said


def test_rows_in_another_order_shapes_and_rounding() -> None:
    said = _told(WholeTensor(VALUES[[0, 2, 1, 3, 4, 5]], "float32"))
    assert "rows are in another order: row 1 is row 2 of the other run, row 2 is row 1 of the other run" in said
    assert "only rows 1–2 of 6" in said
    assert "[6, 128] elements in A, [3, 128] in B" in _told(WholeTensor(VALUES[:3], "float32"))
    assert "no element is beyond rounding" in _told(WholeTensor(VALUES * (1 + 1e-7), "float32"))
    bad = VALUES.copy()
    bad[1, 1] = np.nan
    assert "1 of 768 elements" in _told(WholeTensor(bad, "float32"))


def _files(folder: Path, tensors: dict[TensorKey, list[np.ndarray[Any, Any]]]) -> CloseupFiles:
    """What one rank would have kept: of each tensor a part for each microbatch."""
    folder.mkdir()
    lines = []
    for number, (key, parts) in enumerate(tensors.items()):
        for microbatch, values in enumerate(parts):
            file = f"closeup-rank00000-{number}{microbatch}.npy"
            np.save(folder / file, values.reshape(-1))
            whole = KeptTensor(
                *key, microbatch, 0, 0, 0, "float32", list(values.shape), None, [0, 0], [0, values.size], 0, file
            )
            lines.append(json.dumps(whole.__dict__))
    (folder / "closeup-rank00000.jsonl").write_text("\n".join(lines) + "\n")
    return CloseupFiles(folder)


def test_samples_that_were_read_in_another_order(tmp_path: Path) -> None:
    read = TensorKey("input", "", 0)
    other = VALUES[[0, 2, 4, 1, 3, 5]]  # as two replicas read in turns
    files = [
        _files(tmp_path / "a", {read: [VALUES]}),
        _files(tmp_path / "b", {read: [other[:3], other[3:]]}),
        _files(tmp_path / "c", {read: [other[:3], 2 * other[3:]]}),
    ]
    order = order_of_samples(files[0], files[1])
    assert order is not None
    whole = files[1].whole(read)
    assert whole is not None
    assert whole.pieces == [(0, 0, 3), (0, 1, 3)]
    np.testing.assert_array_equal(whole.values[order], VALUES)
    assert order_of_samples(files[0], files[2]) is None
    assert files[1].whole(read, call=1) is None
    (tmp_path / "a" / "closeup-rank00000.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="says of no tensor"):
        CloseupFiles(tmp_path / "a")


# -- what ranks keep -------------------------------------------------------------------------------------------------


def _train(folder: str, fault: str) -> int:
    from support.faults.numerics_faults import FAULTS
    from support.training.numerics_training import train

    try:
        train(folder, FAULTS[fault] if fault else None, steps=5)
    except SystemExit as ended:
        return int(ended.code or 0)
    return -1


@pytest.fixture
def kept(ranks: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[RecordedRun, CloseupFiles]]:
    """``kept(degrees, fault, step, module)``: a training with whole tensors of a module."""

    def made(degrees: str, fault: str, step: int, module: str) -> tuple[RecordedRun, CloseupFiles]:
        place = tmp_path / f"{degrees} {fault}"
        world, config = DEGREES[degrees]
        env = {"SMP_NUMERICS_CLOSEUP": Closeup(step, module, str(place / "tensors")).to_text()}
        ended = ranks(_train, world, str(place / "numbers"), fault, config=config, env=env)
        assert set(ended) == {0}
        return RecordedRun.read(str(place / "numbers")), CloseupFiles(place / "tensors")

    return made


@pytest.mark.parametrize(
    "degrees", ["sdp", pytest.param("tp-own", marks=pytest.mark.full), pytest.param("pp-dp", marks=pytest.mark.full)]
)
def test_whole_tensors_are_those_of_one_process(kept: Callable[..., Any], degrees: str) -> None:
    module = "blocks.1.mlp.2" if degrees != "tp-own" else "blocks.1"
    one, files = kept("one", "", 1, module)
    other, others = kept(degrees, "", 1, module)
    assert {step for step, _ in one.moments} == {step for step, _ in other.moments} == {0, 1}
    assert order_of_samples(files, others) is None
    compared = 0
    for key in files.keys:
        if key.phase == "loss" or others.whole(key) is None:
            continue
        a, b = files.whole(key), others.whole(key)
        np.testing.assert_allclose(a.values, b.values, rtol=2e-3, atol=2e-6, err_msg=str(key))
        compared += 1
    assert compared >= (6 if degrees != "tp-own" else 3)


def test_a_fault_in_one_row_is_shown(kept: Callable[..., Any]) -> None:
    one, files = kept("one", "", 0, "tokens")
    other, others = kept("dp", "a row of the embedding zero", 0, "tokens")
    first = compare(one, other).first
    assert first is not None
    copies = files.whole(first.key), others.whole(first.key)
    said = describe_differences(*copies, first.key, first.allowed, (one.heads, other.heads), RunNames("A", "B"))
    assert said[0].startswith("16 of ")
    assert any(sentence.startswith("only rows 3 of ") for sentence in said)
    assert said[-1] == "all of them are 0 in B"
    assert "a row of the embedding zero" in FAULTS


# -- the plan --------------------------------------------------------------------------------------------------------


@pytest.fixture
def differing() -> Callable[..., Any]:
    """``differing(start)``: two runs of which the second has another result at step 4."""

    def made(start: Start) -> Any:
        heads = [replace(HEAD, start=start.__dict__)] * 2
        values = [STEP] * 4
        runs = [
            RecordedRun.of(
                name, [(head, [RecordedMoment(step, 0, list(v), "r") for step, v in enumerate([*values, last])])]
            )
            for name, head, last in zip("AB", heads, (STEP, changed(("output", "b"))), strict=True)
        ]
        return compare(*runs)

    return made


def test_it_begins_with_the_newest_checkpoint_that_both_have(differing: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    found = differing(Start(str(script), ["--x", "1"], str(tmp_path), {"ddp": True}, str(tmp_path)))
    planned = Bisection.plan(
        found,
        ("", "run b"),
        tmp_path / "f",
        lambda _: [Saved(step, tmp_path / f"{step}_partial") for step in (2, 4, 6)],
    )
    assert planned is not None
    assert (planned.begin, planned.suspect.step, planned.suspect.module) == (4, 4, "b")
    assert planned.commands[0][-6:] == ("1", "--parameters", '{"ddp": true}', str(script), "--x", "1")
    assert planned.commands[1] == ("run", "b")
    folder = planned._checkpoint_folder(0)
    assert (folder / "newest").read_text() == "4_partial"
    assert (folder / "4_partial").readlink() == tmp_path / "4_partial"
    without = Bisection.plan(found, ("", ""), tmp_path / "g", lambda _: [])
    assert without is not None
    assert without.begin == 0


def test_runs_that_nobody_can_start_again(differing: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for start, said in (
        (Start(), "says of no script"),
        (Start(str(script), ["--token", "***"]), "has a secret among its words"),
        (Start(str(script), []), "which this machine does not have"),
        (Start(words="x"), "which is no command"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=said):
            Bisection.plan(differing(start), ("", ""), tmp_path, lambda _: [])


_SCRIPT = """
import sys
import torch, torch.nn.functional as F
import smdistributed.modelparallel.torch as smp

smp.init()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 50))
model = smp.DistributedModel(net)
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

@smp.step
def train_step(ids):
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    model.backward(loss)
    return loss

for number in range(6):
    if number == 2 and sys.argv[1] == "wrong":
        with torch.no_grad():
            net[1].weight[4:8] *= 0.5
    ids = torch.randint(50, (8, 5), generator=torch.Generator().manual_seed(number)).chunk(smp.dp_size())[smp.dp_rank()]
    optimizer.zero_grad()
    train_step(ids)
    optimizer.step()
"""


@pytest.mark.job
@pytest.mark.full
@pytest.mark.timeout(500)
def test_both_runs_are_repeated_and_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    for name, word, processes in (("a", "right", 1), ("b", "wrong", 2)):
        command = [sys.executable, "-m", "smp_launch", "run", "--processes", str(processes)]
        command += ["--parameters", json.dumps({"ddp": True}), str(script), word]
        monkeypatch.setenv("SMP_RECORD_NUMERICS", str(tmp_path / name))
        monkeypatch.setenv("SMP_RECORD_NUMERICS_EVERY", "1")
        subprocess.run(command, check=True, cwd=tmp_path)
    said = flat(
        call("diff", str(tmp_path / "a"), str(tmp_path / "b"), "--bisect", "--folder", str(tmp_path / "f"), code=1)
    )
    assert "both run again from the start up to step 2, with the tensors of 1 whole" in said
    assert "weight of 1.weight, element by element: 64 of 256 elements of [16, 16] differ; the first is [4, 0]:" in said
    assert "only rows 4–7 of 16 along axis 0 differ" in said
    assert "each is 0.5 times as great in" in said
