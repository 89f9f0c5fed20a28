"""Run the reference client's ``train.py`` unmodified, with what it lacks on a machine without GPUs and FlashAttention.

    cd …/sm-distributed_model_parallel_v2/shared-scripts && python PATH/client.py ARGUMENTS OF train.py

Supplied: ``attn_implementation`` is ``"sdpa"``, since ``flash_attn`` needs a GPU; ``statistics.stdev`` of one number is 0, since
the script takes it over the ranks that save, and a copy that is not sharded has one such rank; an exception of Megatron, whose
import decides whether the script saves asynchronously.
"""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import statistics
import sys
import types
from typing import Any

import transformers


def supply_attention() -> None:
    for name in ("from_config", "from_pretrained"):
        former = getattr(transformers.AutoModelForCausalLM, name).__func__

        def with_sdpa(cls: Any, *arguments: Any, _former: Any = former, **named: Any) -> Any:
            return _former(cls, *arguments, **{**named, "attn_implementation": "sdpa"})

        setattr(transformers.AutoModelForCausalLM, name, classmethod(with_sdpa))


def supply_deviation() -> None:
    former = statistics.stdev

    def stdev(data: Any, xbar: Any = None) -> float:
        return former(data, xbar) if len(data) > 1 else 0.0

    statistics.stdev = stdev  # type: ignore[assignment]


def supply_exception() -> None:
    """Let ``megatron.core.dist_checkpointing.mapping`` be imported, for one name that asynchronous saves need and never use."""
    path = "megatron"
    for part in ("", ".core", ".dist_checkpointing", ".mapping"):
        path += part
        sys.modules[path] = types.ModuleType(path)
        sys.modules[path].__path__ = []
        sys.modules[path].__spec__ = importlib.machinery.ModuleSpec(path, None)
    sys.modules[path].CheckpointingException = type("CheckpointingException", (Exception,), {})  # type: ignore[attr-defined]


if __name__ == "__main__":
    supply_attention()
    supply_deviation()
    supply_exception()
    beside = os.path.dirname(os.path.abspath(__file__))
    folder = beside if os.path.exists(os.path.join(beside, "train.py")) else os.getcwd()
    sys.path.insert(0, folder)
    sys.argv[0] = "train.py"
    runpy.run_path(os.path.join(folder, "train.py"), run_name="__main__")
