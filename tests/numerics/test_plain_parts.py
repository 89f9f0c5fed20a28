"""Parts of ``smp-estimator verify --plain``: joined batches, ties, weights of losses, facts."""

from __future__ import annotations

import sys
from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from smp_config import ConfigError
from smp_records.plain_job import LoaderFacts, ParameterFacts, PlainFacts, read_facts
from smp_runtime.errors import SMPRuntimeError
from smp_tools.numerics.plain.batch_functions import BatchFunction, run_with_batches
from smp_tools.numerics.plain.batches import JoinedBatches, RankBatches, join
from smp_tools.numerics.plain.loss_weight import LossWeight
from smp_tools.numerics.plain.norm_statistics import keep_statistics_out
from smp_tools.numerics.plain.starting_point import load_start, save_start
from smp_tools.numerics.plain.ties import ParameterTies

Pair = namedtuple("Pair", "ids targets")


@dataclass
class Sample:
    ids: torch.Tensor
    text: list[str]


def _rows(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count)[:, None] * torch.ones(1, 2, dtype=torch.long)


def _recorded(folder: Path, module: str, calls: str) -> tuple[list[Any], list[Any]]:
    """Return the batches that ``calls`` gets on a rank, and then in one process."""
    script = folder / f"uses_{module}.py"
    script.write_text(f"from {module} import batch\nimport torch\n{calls}")
    kept, found = folder / f"{module}-kept", list[list[Any]]()
    for batches in (RankBatches(kept, 0, lambda: 0, 9, lambda: None), JoinedBatches(kept)):
        sys.modules.pop(module, None)
        replays = isinstance(batches, JoinedBatches)
        run_with_batches(
            str(script), f"{module}:batch", lambda made, b=batches, r=replays: BatchFunction(made, b, replays=r)
        )
        found.append(vars(sys.modules["__main__"])["got"])
    return found[0], found[1]


def test_results_of_a_function_are_kept_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an evaluation are left alone, and an iterator begins an epoch."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    counter = "count = 0\ndef batch(add=0):\n    global count\n    count += 1\n    return count + add\n"
    (tmp_path / "counts.py").write_text(counter)
    calls = "got = [batch(), batch(add=10)]\nwith torch.no_grad():\n    got += [batch(100)]\ngot += [batch()]\n"
    here, replayed = _recorded(tmp_path, "counts", calls)
    assert here == [1, 12, 103, 4]
    assert replayed[:2] + replayed[3:] == [1, 12, 4]
    assert replayed[2] != 103, "the one process evaluates on its own"
    (tmp_path / "yields.py").write_text("def batch(count):\n    yield from range(count)\n")
    assert _recorded(tmp_path, "yields", "got = [*batch(2), *batch(3)]\n") == ([0, 1, 0, 1, 2], [0, 1, 0, 1, 2])
    more = BatchFunction(lambda: 1, JoinedBatches(tmp_path / "none"), replays=True)
    with pytest.raises(SMPRuntimeError, match="more often than a rank did"):
        more()


@pytest.mark.parametrize(
    ("make", "look"),
    [
        (lambda rows: rows, lambda batch: batch),
        (lambda rows: {"ids": rows, "scale": 2.0}, lambda batch: batch["ids"]),
        (lambda rows: UserDict(ids=rows), lambda batch: batch["ids"]),
        (lambda rows: [rows, rows], lambda batch: batch[1]),
        (lambda rows: (rows, {"more": rows}), lambda batch: batch[1]["more"]),
        (lambda rows: Pair(rows, rows), lambda batch: batch.targets),
        (lambda rows: Sample(rows, ["a"] * len(rows)), lambda batch: batch.ids),
    ],
)
def test_batches_of_every_kind_are_joined_in_the_order_of_ranks(make: Any, look: Any) -> None:
    joined = join([make(_rows(0, 2)), make(_rows(2, 3))])
    assert type(joined) is type(make(_rows(0, 1)))
    assert torch.equal(look(joined), _rows(0, 5))


def test_lists_of_samples_are_joined() -> None:
    assert join([["a", "b"], ["c"]]) == ["a", "b", "c"]
    assert join([{"n": 3}, {"n": 3}]) == {"n": 3}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], "which cannot be joined to one batch"),
        ([{"tokens": 3}, {"tokens": 4}], "not known how to join"),
        ([torch.tensor(3), torch.tensor(4)], "not known how to join"),
        ([object(), object()], "not known how to join"),
    ],
)
def test_what_cannot_be_joined_is_refused(parts: list[Any], said: str) -> None:
    with pytest.raises(SMPRuntimeError, match=said):
        join(parts)


def test_one_process_takes_batches_and_lengths_of_the_ranks(tmp_path: Path) -> None:
    samples = TensorDataset(torch.arange(12))
    for rank in range(2):
        sampler = DistributedSampler(samples, num_replicas=2, rank=rank, shuffle=False)
        loader = DataLoader(samples, batch_size=2, sampler=sampler)
        kept = RankBatches(tmp_path, rank, lambda: 0, 1, lambda: None)
        assert kept.length(loader, len(loader)) == 3
        batches = [batch[0].tolist() for batch in kept.iterate(loader, iter(loader))]
        assert batches[0] == [rank, rank + 2]
    whole = DataLoader(samples, batch_size=99)
    joined = JoinedBatches(tmp_path)
    assert joined.length(whole, len(whole)) == 3
    assert [batch[0].tolist() for batch in joined.iterate(whole)] == [[0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9, 11]]
    assert list(joined.iterate(whole)) == []


@pytest.mark.parametrize("seeded", [True, False])
def test_the_next_epoch_shows_its_order_and_ends_the_script(tmp_path: Path, seeded: bool) -> None:
    samples = TensorDataset(torch.arange(12))
    sampler = DistributedSampler(samples, num_replicas=2, rank=0)
    loader = DataLoader(samples, batch_size=2, sampler=sampler)
    updates, ended = [0], []
    kept = RankBatches(tmp_path, 0, lambda: updates[0], 2, lambda: ended.append(True))
    evaluation = DataLoader(samples, batch_size=2)
    for epoch in range(2):
        if seeded:
            sampler.set_epoch(epoch)
        for _ in kept.iterate(loader, iter(loader)):
            updates[0] += 1
        assert len(list(kept.iterate(evaluation, iter(evaluation)))) == 6
    first, second = kept.book.facts[0].epochs
    assert (len(first), len(second), ended) == (2, 2, [True])
    assert (first == second) is not seeded
    assert kept.book.facts[0].shuffles
    assert kept.book.facts[0].is_distributed


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_ties_that_are_broken_later() -> None:
    ties, original = ParameterTies(), nn.Module.load_state_dict
    try:
        ties.begin()
        kept, loaded, emptied, untied = (_Tied() for _ in range(4))
        with torch.device("meta"):
            emptied = _Tied()
        emptied.to_empty(device="cpu")
        loaded.load_state_dict({name: tensor.clone() for name, tensor in loaded.state_dict().items()}, assign=True)
        untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())  # the script means it
    finally:
        nn.Module.load_state_dict = original  # type: ignore[method-assign]
        ties.end()
    pair = [["embed.weight", "head.weight"]]
    assert [ties.broken(each) for each in (kept, loaded, emptied, untied)] == [[], pair, pair, []]


@pytest.mark.parametrize(
    ("make", "weight"),
    [
        (lambda x: nn.functional.cross_entropy(x, torch.tensor([0, 1])) / 4, 0.25),
        (lambda x: (x.square().mean() * 0.5).float(), 0.5),
        (lambda x: nn.functional.mse_loss(x, torch.zeros(2, 3)), 1.0),
        (lambda x: nn.functional.cross_entropy(x, torch.tensor([0, 1]), reduction="sum") / 2, None),
        (lambda x: x.mean() + x.square().mean(), None),
    ],
)
def test_the_weight_of_a_mean_loss(make: Any, weight: float | None) -> None:
    loss = make(torch.ones(2, 3, requires_grad=True))
    found = LossWeight(loss)
    loss.backward()
    found.close()
    assert found.value == weight


def test_batch_norms_have_the_same_result_for_any_batch() -> None:
    torch.manual_seed(0)
    model, values = nn.Sequential(nn.BatchNorm1d(3)), torch.randn(8, 3)
    assert keep_statistics_out(model)
    parts = torch.cat([model(values[:4]), model(values[4:])])
    assert torch.equal(model(values), parts)
    assert model[0].num_batches_tracked == 3
    assert not torch.equal(model[0].running_mean, torch.zeros(3))
    assert not keep_statistics_out(nn.Sequential(nn.LayerNorm(3)))


def test_one_process_begins_with_the_weights_of_the_ranks(tmp_path: Path) -> None:
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_start(tmp_path, 0, 0, one)
    assert load_start(tmp_path, 0, other)
    assert torch.equal(one.weight, other.weight)
    assert not load_start(tmp_path, 0, other)
    with pytest.raises(SMPRuntimeError, match="depends on the number of ranks"):
        load_start(tmp_path, 0, nn.Linear(3, 4))


def test_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no plain-rank"):
        read_facts(tmp_path)
    facts = PlainFacts(
        rank=1, world=2, scalings=[None, 0.5], loaders=[LoaderFacts("a", True, True, [["x"]])], broken_ties=[["a", "b"]]
    )
    facts.parameters["w"] = ParameterFacts(has_changed=True)
    facts.write(tmp_path)
    assert read_facts(tmp_path) == [facts]
    (tmp_path / "plain-rank00000.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no record of a rank"):
        read_facts(tmp_path)
