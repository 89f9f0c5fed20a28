"""Every public name of PyTorch's CUDA modules is covered, refused with a sentence, or listed as needing no device."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter

import pytest
import torch

from smp_emulation.covered.unchanged import UNCHANGED
from smp_emulation.errors import NeedsGpuError
from smp_emulation.installing import CALLS, emulated

MODULES = """
    torch.cuda torch.cuda.amp torch.cuda.comm torch.cuda.gds torch.cuda.graph_annotations torch.cuda.graphs
    torch.cuda.green_contexts torch.cuda.jiterator torch.cuda.memory torch.cuda.nccl torch.cuda.nvtx
    torch.cuda.profiler torch.cuda.random torch.cuda.sparse torch.cuda.streams torch.cuda.tunable torch.accelerator
    torch.accelerator.memory torch.backends.cuda
""".split()
#: They have no list of their public names, so imports stand among them.
NOT_THEIRS = {"annotations", "ctypes", "torch"}

COVERED = {call.name: call for call in CALLS}


def _public(module):
    names = getattr(module, "__all__", None)
    names = [name for name in dir(module) if not name.startswith("_")] if names is None else names
    return [name for name in names if not inspect.ismodule(getattr(module, name, None)) and name not in NOT_THEIRS]


@pytest.fixture(scope="module")
def before():
    """By module, its public names and what stands there without the emulation."""
    found = {}
    for way in MODULES:
        try:
            module = importlib.import_module(way)
        except ImportError:  # of another release
            continue
        found[way] = {name: getattr(module, name) for name in _public(module)}
    return found


@pytest.mark.parametrize("way", MODULES)
def test_public_names_are_covered_or_listed(before, way):
    if way not in before:
        pytest.skip(f"PyTorch {torch.__version__} has no {way}")
    with emulated():
        module = importlib.import_module(way)
        is_answered = {name: getattr(module, name) is not original for name, original in before[way].items()}
    unknown = [name for name, answered in is_answered.items() if not answered and f"{way}.{name}" not in UNCHANGED]
    assert not unknown, (
        f"PyTorch {torch.__version__} exports names of {way} that the emulation leaves to a CUDA build: {', '.join(unknown)}; "
        "answer or refuse them in container/smp_emulation/, or list them in unchanged.py"
    )
    both = [name for name, answered in is_answered.items() if answered and f"{way}.{name}" in UNCHANGED]
    assert not both, f"replaced, and listed as unchanged: {both}"


#: 2.8 or 2.15.
IN_OTHER_RELEASES = {
    *(
        name
        for name in [*UNCHANGED, *COVERED]
        if name.startswith(("torch.cuda.graph_annotations.", "torch.cuda.graphs."))
    ),
    *(
        f"torch.cuda.green_contexts.{name}"
        for name in ("SMPartition", "get_num_locality_domains", "is_localization_supported")
    ),
    *(
        f"torch.cuda.tunable.{name}"
        for name in (
            "dynamic_dims_mask",
            "get_cublaslt_requested_algo_count",
            "set_cublaslt_requested_algo_count",
            "wildcard_fallback_enable",
            "wildcard_fallback_is_enabled",
            "write_file",
            "write_file_on_exit",
        )
    ),
    "torch.cuda.gds.is_available",
    "torch.cuda.profiler.init",
    "torch.distributed.ProcessGroupNCCL",  # in builds with CUDA
    "torch.version.cuda",  # None
}


def test_listed_names_exist():
    """In the release that the tests are made for, but for what an older or newer one has."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip("made for 2.13")
    absent = {name for name in [*UNCHANGED, *COVERED] if _stands(name) is None} - IN_OTHER_RELEASES
    assert absent == set()


def test_every_call_is_listed_once_and_says_what_it_does():
    assert [name for name, times in Counter(call.name for call in CALLS).items() if times > 1] == []
    assert all(call.does for call in CALLS)


#: Functions with an argument ``device`` that is not for them: their tensors are those that they are given.
OF_OTHERS = {
    "torch.Event": "replaced",
    "torch.GradScaler": "torch.amp.GradScaler",
    "torch.ScriptClass": "no function",
    "torch.from_file": "makes CPU tensors only",
    "torch.Tensor.ipu": "of other devices",
    "torch.Tensor.mtia": "of other devices",
    "torch.Tensor.xpu": "of other devices",
}


@pytest.mark.parametrize("way", ["torch", "torch.Tensor", "torch.fft", "torch.nested", "torch.sparse", "torch.special"])
def test_functions_that_take_a_device_are_covered(way):
    owner = torch
    for part in way.split(".")[1:]:
        owner = getattr(owner, part)
    missing = []
    for name in dir(owner):
        function = getattr(owner, name, None)
        built_in = callable(function) and not inspect.isfunction(function) and not inspect.isclass(function)
        if name.startswith("_") or not built_in or f"{way}.{name}" in OF_OTHERS:
            continue
        head = (function.__doc__ or "").partition("\n\n")[0]
        if re.search(r"\bdevice\b ?=", head) and f"{way}.{name}" not in COVERED:
            missing.append(name)
    assert missing == []


REFUSED = [call for call in CALLS if call.is_refused and call.name != "torch.cuda._lazy_init"]


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.name)
def test_what_needs_a_gpu_says_so(call):
    value = call.replacement(None)
    with pytest.raises(NeedsGpuError) as raised:
        value()
    what, how, instead = str(raised.value).split("; ", 2)
    assert what.startswith(f"{call.name} needs a GPU: ")
    assert "SMP_EMULATE_CUDA=1" in how
    assert "SMP_EMULATE_CUDA" in instead or "torch.distributed" in instead or "plain PyTorch" in instead
    if inspect.isclass(value):
        assert not isinstance(torch.ones(1), value)  # may be named
        with pytest.raises(NeedsGpuError):
            value.create  # noqa: B018 - a static method that makes one


def test_all_is_given_back():
    names = [call.name for call in CALLS]
    before = [_stands(name) for name in names]
    with emulated():
        assert torch.cuda.is_available()
        assert sum(_stands(name) is not value for name, value in zip(names, before, strict=True)) > 200
    assert [name for name, value in zip(names, before, strict=True) if _stands(name) is not value] == []
    assert not torch.cuda.is_available()
    assert "is_cuda" not in vars(torch.Tensor)


def _stands(name):
    owner = torch
    for part in name.split(".")[1:]:
        owner = getattr(owner, part, None)
    return owner
