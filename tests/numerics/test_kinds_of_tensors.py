"""Numbers are recorded of any kind of tensor, and an error of the recorder ends the recording, not the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from smp_estimator.numerics.recorded_run import RecordedRun
from smp_records.numerics import GRADIENT, PROJECTIONS, UPDATE
from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
from smp_tools.numerics.sketch import bits_of, sketch_of

SHAPES = [(), (0,), (3,), (2, 0, 3), *((2, 3, *[2] * more) for more in range(7))]
STORAGE_ONLY = ("float4_e2m1fn_x2", "bits8", "uint4")
KINDS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint32),
    *(getattr(torch, name) for name in STORAGE_ONLY if hasattr(torch, name)),
]


def _tensor(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    torch.manual_seed(3)
    if kind.is_complex:
        return torch.randn(shape, dtype=torch.complex64).to(kind)
    if kind in (torch.int64, torch.int16, torch.uint8, torch.uint32, torch.bool):
        return torch.randint(0, 2, shape).to(kind)
    numbers = torch.randn(shape)
    return numbers.to(torch.uint8).view(kind) if str(kind).endswith(STORAGE_ONLY) else numbers.to(kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_and_shape_has_numbers_whose_parts_add_up(kind: torch.dtype) -> None:
    for shape in SHAPES:
        whole = _tensor(shape, kind)
        sketches = [sketch_of(whole, TensorRegion.of(shape), counts_small=True, precise=True), sketch_of(whole)]
        assert all(sketch.numbers.isfinite().all() for sketch in sketches), shape
        assert sketches[0].dtype == str(kind).removeprefix("torch.")
        count = whole.numel()
        if not shape or not count:
            continue
        flat, middle = whole.reshape(-1), count // 2
        halves = [
            sketch_of(flat[first:last], TensorRegion.of(shape, flat=(first, last)), precise=True)
            for first, last in ((0, middle), (middle, count))
        ]
        sums = [part.numbers[2 : 2 + PROJECTIONS] for part in halves]
        torch.testing.assert_close(sums[0] + sums[1], sketches[0].numbers[2 : 2 + PROJECTIONS])
        assert int(halves[0].bits + halves[1].bits) == int(bits_of(whole))


@pytest.mark.parametrize(
    "view", ["transposed", "sliced", "expanded", "conjugate", "sparse", "csr", "nested", "negative"]
)
def test_views_and_layouts_have_the_numbers_of_a_plain_copy(view: str) -> None:
    matrix = _tensor((4, 6), torch.complex64 if view in ("conjugate", "negative") else torch.float32)
    tensor = {
        "transposed": lambda: matrix.t(),
        "sliced": lambda: matrix[::2, 1::2],
        "expanded": lambda: matrix[:, :1].expand(4, 6),
        "conjugate": lambda: matrix.conj(),
        "negative": lambda: matrix.conj().imag,
        "sparse": lambda: matrix.to_sparse(),
        "csr": lambda: matrix.to_sparse_csr(),
        "nested": lambda: torch.nested.as_nested_tensor([matrix[:1], matrix[1:]], layout=torch.jagged),
    }[view]()
    plain = {"sparse": matrix, "csr": matrix, "nested": matrix}.get(view, tensor).clone()
    plain = torch.empty_like(plain, memory_format=torch.contiguous_format).copy_(plain).resolve_conj().resolve_neg()
    torch.testing.assert_close(sketch_of(tensor).numbers, sketch_of(plain).numbers)
    assert int(bits_of(tensor)) == int(bits_of(plain))


class _AllKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.weights = nn.ParameterList([torch.randn(2, 3, *[2] * more) for more in range(6)])
        self.single = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.phases = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.table = nn.Parameter(torch.arange(8), requires_grad=False)
        self.mask = nn.Parameter(torch.ones(8, dtype=torch.bool), requires_grad=False)
        self.register_buffer("small", torch.ones(8).to(torch.float8_e4m3fn))
        self.register_buffer("turned", torch.ones(4, 2).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x[:, self.table]) * self.mask * self.small.float()
        x = torch.fft.irfft(torch.fft.rfft(x) * self.phases, n=8) * self.single
        return x.square().mean() + sum(each.square().sum() for each in self.weights) + self.empty.sum()


def _training(folder: Path) -> tuple[Callable[[torch.Tensor], Any], Any]:
    import smdistributed.modelparallel.torch as smp

    smp.record_numerics(folder, every=1)
    model = smp.DistributedModel(_AllKinds())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(trained, lr=1e-2))

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        model.backward(loss)
        return loss

    return step, optimizer


def test_parameters_of_all_kinds_are_recorded(
    solo: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_NUMERICS_GUARDS", "finite,replicas=1")
    session = solo({})
    step, optimizer = _training(tmp_path)
    for _ in range(2):
        step(torch.randn(4, 8))
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    run = RecordedRun.read(str(tmp_path))
    names = {(key.phase, key.name) for totals in run.moments.values() for key in totals}
    assert {(GRADIENT, "phases"), (UPDATE, "weights.5"), (GRADIENT, "single")} <= names


@pytest.mark.parametrize("place", ["sketch_of", "live_weights", "argument_tensors", "owner_of"])
def test_an_error_of_the_recorder_ends_the_recording_only(
    solo: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    from smp_tools.numerics import module_watch, recorder

    session = solo({})
    step, optimizer = _training(tmp_path)
    module = recorder if hasattr(recorder, place) and place != "owner_of" else module_watch

    def fails(*_: Any, **__: Any) -> Any:
        raise OverflowError("too big")

    monkeypatch.setattr(module, place, fails)
    losses = []
    with caplog.at_level(logging.WARNING, logger="smp"):
        for _ in range(3):
            losses.append(float(step(torch.ones(4, 8)).reduce_mean()))
            optimizer.step()
            optimizer.zero_grad()
        session.close()
    assert losses[2] < losses[0]
    assert [record.message for record in caplog.records if "OverflowError" in record.message] != []
    assert sum("OverflowError" in record.message for record in caplog.records) == 1
