"""Explanations for scripts that failed by a common mistake: what is missing, and what to write or type instead."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from smp_config.machine import emulation
from smp_launch.failures import early_ends

#: Codes of errors that are not this library's own.
JOB_LACKS, OF_STEP, OF_GPU = "SMP319", "SMP302", "SMP601"

#: Attributes of step outputs. A script may look for them on tensors that a step-decorated function gets or makes.
_OF_STEP_OUTPUT = ("reduce_mean", "reduce_sum")

#: PyTorch's message for a backward pass from a value without one, as are the values that a step returns.
_WITHOUT_GRADIENT = "element 0 of tensors does not require grad"

#: Packages that are, or bring, kernels for GPUs.
_OF_KERNELS = frozenset(
    """amp_C apex apex_C bitsandbytes causal_conv1d cupy deep_ep flash_attn flash_attn_2_cuda flash_attn_interface flashinfer
    fused_dense_cuda fused_layer_norm_cuda grouped_gemm mamba_ssm numba pycuda pynvml rmm tensorrt transformer_engine
    transformer_engine_torch triton vllm xformers""".split()
)

#: Messages of PyTorch, Triton and the system's loader if there is no GPU.
_FROM_CUDA_CODE = re.compile(
    r"not compiled with CUDA|not linked with support for cuda|from the 'CUDA' backend|no NVIDIA driver|CUDA driver|CUDA_HOME|"
    r"0 active drivers|needs a non-CPU accelerator|"
    r"lib(cuda|cudart|cublas|cublasLt|cudnn|cufft|curand|cusolver|cusparse|nccl|nvrtc|nvToolsExt)[\w-]*\.so",
    re.IGNORECASE,
)

#: Messages of PyTorch itself about a call of torch.cuda without a GPU.
_WITHOUT_GPU = re.compile(r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available")

#: Names the folder of a channel, by its name in capital letters.
_CHANNEL = "SM_CHANNEL_"

#: Set in every job of the platform, and in local ones; names its channels.
_CHANNELS_VARIABLE = "SM_CHANNELS"

#: Modules whose package has another name.
_PACKAGE_OF = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
}

#: Characters of a message: PyTorch lists all its backends behind it.
_LOOKED_AT = 400

#: Files of a channel that a message names.
_SHOWN_FILES = 5

_NO_GPU = (
    "this needs a GPU, or CUDA code; there is no GPU here, and torch.cuda is emulated on the CPU (SMP_EMULATE_CUDA=1), which runs "
    'no CUDA code; use what plain PyTorch has instead where os.environ.get("SMP_EMULATE_CUDA") is "1", or run this part of the '
    "script on a machine with a GPU"
)

_NOT_EMULATED = (
    "there is no GPU here, or PyTorch is built without CUDA; write .to(smp.state.device) instead of .cuda(), or let torch.cuda act "
    "on the CPU with SMP_EMULATE_CUDA=1"
)

_BARE_NUMBER = (
    "a bare number as in torch.device(0) asks PyTorch's own code for the accelerator; there is no GPU here, and torch.cuda is "
    'emulated on the CPU (SMP_EMULATE_CUDA=1), which that code does not know; write torch.device("cuda", 0), which means the same'
)

_BACKWARD_OUTSIDE = (
    "what a function with @smp.step returns has no gradients; call model.backward(loss) in that function, right after the loss, "
    "and no backward() outside it"
)


@dataclass(frozen=True)
class Explanation:
    """Words for a beginner that go behind an error's message, and the code of the error."""

    words: str
    code: str


def find(error: BaseException, folders: Iterable[str]) -> Explanation | None:
    """Return what a beginner must know of an error, or None if nothing is known.

    Args:
        folders: folders of the script. Their files may have names of Python's own modules.
    """
    folders = list(folders)
    judges: tuple[tuple[str, Callable[[], str | None]], ...] = (
        (OF_STEP, lambda: _why_tensor_of_step(error)),
        (OF_STEP, lambda: _why_no_gradient(error)),
        (JOB_LACKS, lambda: _why_no_channel(error, os.environ)),
        (JOB_LACKS, lambda: early_ends.why_no_input(error)),
        (JOB_LACKS, lambda: early_ends.why_hidden(error, folders)),
        (OF_GPU, lambda: _why_no_gpu(error, os.environ)),
        (JOB_LACKS, lambda: _why_no_package(error, os.environ)),
        (JOB_LACKS, lambda: _why_no_file(error, os.environ)),
    )
    for code, judge in judges:
        if (words := judge()) is not None:
            return Explanation(words, code)
    return None


def _why_tensor_of_step(error: BaseException) -> str | None:
    """Return why a tensor inside a step has no method of a step's output; None for another error."""
    wanted = getattr(error, "name", None)
    if not isinstance(error, AttributeError) or wanted not in _OF_STEP_OUTPUT or type(error.obj).__name__ != "Tensor":
        return None
    return (
        "this is a tensor already; only what a function with @smp.step returns to its caller, a StepOutput, has "
        f"{wanted}()"
    )


def _why_no_gradient(error: BaseException) -> str | None:
    """Return why a backward pass outside a step has nothing to start from; None for another error."""
    if not isinstance(error, RuntimeError) or not str(error).startswith(_WITHOUT_GRADIENT):
        return None
    # A script that has not imported the runtime has no steps to be outside of.
    if "smp_runtime.step" not in sys.modules:
        return None
    for name in _modules(error):
        if name.startswith("smp_runtime.step."):
            return None
    return _BACKWARD_OUTSIDE


def _why_no_channel(error: BaseException, environ: Mapping[str, str]) -> str | None:
    """Return what to do about a channel that the script asks for and the job lacks; None for another error."""
    wanted = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else None
    if not isinstance(wanted, str) or not wanted.startswith(_CHANNEL):
        return None
    given, name = json.loads(environ.get(_CHANNELS_VARIABLE, "[]")), wanted.removeprefix(_CHANNEL).lower()
    has = f"its channels are {', '.join(given)}" if given else "it has none"
    return (
        f"the job has no channel {name!r} ({has}); give it one: fit({{{name!r}: 'file:///folder'}}), or --channel {name}=FOLDER "
        "of smp-estimator run"
    )


def _why_no_gpu(error: BaseException, environ: Mapping[str, str]) -> str | None:
    """Return what to do about code that wants a GPU where there is none; None for another error."""
    is_emulated = environ.get(emulation.VARIABLE, "0") != "0"
    if is_emulated:
        return _why_not_on_emulated_gpu(error)
    wants_gpu = _WITHOUT_GPU.search(str(error)[:_LOOKED_AT]) is not None
    has_traceback = error.__traceback__ is not None
    return _NOT_EMULATED if wants_gpu and has_traceback else None


def _why_not_on_emulated_gpu(error: BaseException) -> str | None:
    if "Cannot access accelerator device" in str(error):
        return _BARE_NUMBER
    return _NO_GPU if _wants_gpu(error) else None


def _wants_gpu(error: BaseException) -> bool:
    """Return whether an error comes from CUDA code, which no emulation runs.

    The code may belong to a package, a library, or PyTorch.
    """
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _OF_KERNELS:
        return True
    return bool(_FROM_CUDA_CODE.search(str(error)[:_LOOKED_AT]))


def _why_no_package(error: BaseException, environ: Mapping[str, str]) -> str | None:
    """Return where to install a package that is missing, or how to send a file along; None for another error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name or error.__traceback__ is None:
        return None
    root = error.name.partition(".")[0]
    if importlib.util.find_spec(root) is not None:  # another version of a package that is there
        return None
    package = _PACKAGE_OF.get(root, root)
    if _CHANNELS_VARIABLE not in environ:
        return f"install it where the job runs: {sys.executable} -m pip install {package}"
    return (
        f"install it where the job runs, here with {sys.executable} -m pip install {package}, in the cloud by a line of "
        f"requirements.txt beside the script; if {root}.py is a file of yours, send its folder: source_dir, or --source-dir of "
        "smp-estimator run"
    )


def _why_no_file(error: BaseException, environ: Mapping[str, str]) -> str | None:
    """Return where a job finds its files, if the script has opened one that is not there; None for another error.

    A job gets a copy of the script's folder, and its data as channels. So a path that was right before may lead nowhere.
    """
    if not isinstance(error, FileNotFoundError) or error.errno != errno.ENOENT:
        return None
    name = error.filename
    if not isinstance(name, str) or _CHANNELS_VARIABLE not in environ:
        return None
    if "subprocess" in set(_modules(error)):  # a program that is missing
        return None
    path = Path(name)
    for channel, folder in _channels(environ):
        if path.is_relative_to(folder):
            return f"channel {channel!r} holds {_contents(folder)}: correct the name or the folder"
    as_channel = (
        "give the folder as a channel, fit({'train': 'file:///folder'}) or --channel train=FOLDER of smp-estimator run, and read "
        "os.environ['SM_CHANNEL_TRAIN']"
    )
    if path.is_absolute():
        return f"there is no such path where the job runs; correct it, or {as_channel}"
    return f"a relative path begins at the job's copy of the script's folder, {Path.cwd()}; {as_channel}"


def _contents(folder: Path) -> str:
    """Return the first names in a folder."""
    if not folder.is_dir():
        return "nothing"
    names = sorted(each.name for each in folder.iterdir())
    if len(names) > _SHOWN_FILES:
        names = [*names[:_SHOWN_FILES], "…"]
    return ", ".join(names) or "nothing"


def _channels(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    for name in json.loads(environ.get(_CHANNELS_VARIABLE, "[]")):
        if folder := environ.get(f"{_CHANNEL}{name.upper()}"):
            yield name, Path(folder)


def _modules(error: BaseException) -> Iterator[str]:
    """Yield the modules through which an error has come, from the script inward."""
    trace = error.__traceback__
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
