"""Calls that need a GPU: kernels, graphs of kernels, handles of CUDA's libraries."""

from __future__ import annotations

from smp_emulation.calls import CoveredCall, answer_with, refuse_call, refuse_each
from smp_emulation.errors import NeedsGpuError

_GRAPH = "a CUDA graph is a recording of kernels"
_MOMENTS = ("capture_start", "capture_end", "instantiate", "replay_start", "replay_end", "destroy")
_SHARES = "it shares out the multiprocessors of a GPU"
_HANDLE = "it is a handle of CUDA's own libraries"
_FILES = "it moves files past the CPU into the memory of a GPU"
_SOURCE = "it compiles CUDA source code"
_NCCL = "it calls NCCL itself"
_TUNED = "it runs kernels to find the fastest"

_RUN_EAGERLY = (
    'run the step without the graph where os.environ.get("SMP_EMULATE_CUDA") is "1"; the results are the same'
)
_USE_GROUPS = "use torch.distributed, whose collectives run on the CPU too"
_HAVE_FALLBACK = (
    "give the model a path in plain PyTorch for machines without a GPU, or run it on one; C++ extensions without CUDA code can "
    "be built here"
)


def _no_device_here() -> None:
    """Raise NeedsGpuError when PyTorch's own code initializes CUDA for a call that is not emulated."""
    raise NeedsGpuError(
        "this call asks PyTorch's own code for a CUDA device, past everything that is emulated; there is no GPU here, and "
        "torch.cuda is emulated on the CPU (SMP_EMULATE_CUDA=1), which covers functions and methods that Python calls, but neither "
        "torch.ops nor TorchScript; give this one device=tensor.device, the device of a tensor that is there, or run it on a GPU"
    )


CALLS: tuple[CoveredCall, ...] = (
    *refuse_each("torch.cuda", ("CUDAGraph", "graph"), _GRAPH, _RUN_EAGERLY, is_class=True),
    *refuse_each("torch.cuda", ("make_graphed_callables", "graph_pool_handle"), _GRAPH, _RUN_EAGERLY),
    refuse_call("torch.accelerator.Graph", _GRAPH, _RUN_EAGERLY, is_class=True),
    *refuse_each(
        "torch.cuda.graphs",
        (
            "export_dot",
            "export_graph_data",
            *(f"register_graph_{when}_hook" for when in _MOMENTS),
        ),
        _GRAPH,
        _RUN_EAGERLY,
    ),
    *refuse_each("torch.cuda.green_contexts", ("GreenContext", "SMPartition"), _SHARES, is_class=True),
    refuse_call("torch.cuda.green_contexts.get_num_locality_domains", _SHARES),
    answer_with("torch.cuda.green_contexts.is_localization_supported", "False", lambda device_id=None: False),
    answer_with("torch.cuda.gds.is_available", "False", lambda: False),
    answer_with("torch.cuda.graph_annotations.is_available", "False", lambda: False),
    *refuse_each("torch.cuda", ("current_blas_handle", "current_solver_handle"), _HANDLE),
    *refuse_each("torch.cuda.jiterator", ("_create_jit_fn", "_create_multi_output_jit_fn"), _SOURCE, _HAVE_FALLBACK),
    *refuse_each("torch.cuda.gds", ("gds_register_buffer", "gds_deregister_buffer"), _FILES),
    refuse_call("torch.cuda.gds.GdsFile", _FILES, is_class=True),
    *refuse_each(
        "torch.cuda.nccl",
        ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "unique_id", "init_rank"),
        _NCCL,
        _USE_GROUPS,
    ),
    *refuse_each("torch.cuda.tunable", ("tune_gemm_in_file", "mgpu_tune_gemm_in_file"), _TUNED),
    CoveredCall(
        "torch.cuda._lazy_init",
        "refused: asks PyTorch's own code for a device",
        lambda original: _no_device_here,
        is_refused=True,
    ),
)
