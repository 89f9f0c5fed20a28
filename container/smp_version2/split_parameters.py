"""The parameters of transformed models that are parts of larger ones, and their places in these."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from smp_config import Group
from smp_runtime.nn.distributed_module import DistributedModule

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.registry import TensorSlice

#: File of a sharded checkpoint that says which of its tensors are parts of larger ones; only with tensor parallelism.
SPLIT_FILE = "smp_split.json"


def find_slices(model: nn.Module) -> dict[nn.Parameter, TensorSlice]:
    """Return the parameters that tensor parallelism has split, with their places in the whole ones.

    Asked of the modules, since ``fully_shard`` puts other parameters in place of those that ``tsm.transform`` has made.
    """
    found: dict[nn.Parameter, TensorSlice] = {}
    for module in model.modules():
        if not isinstance(module, DistributedModule) or module.tensor_group.size == 1:
            continue
        for name, where in module.tensor_slices.items():
            parameter = module._parameters.get(name)
            if parameter is None:
                continue
            if where.shape != where.local_shape:
                found[parameter] = where
    return found


class SplitRecord:
    """The places of parameters that a job has split, by their names in the models: a checkpoint has parts of them only."""

    def __init__(self) -> None:
        self._slices: dict[str, TensorSlice] = {}
        self._ambiguous: set[str] = set()

    @classmethod
    def of(cls, ranks: Ranks) -> SplitRecord:
        """Return the record of the running job."""
        return ranks.keep(cls, cls)

    def note(self, model: nn.Module) -> None:
        """Take the places in a model that was just split. A name that models split in different ways is left out of the record."""
        slices = find_slices(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            where = slices.get(parameter)
            if where is None:
                continue
            known = self._slices.setdefault(name, where)
            if known != where:
                self._ambiguous.add(name)

    def to_json(self, ranks: Ranks) -> str | None:
        """Return the content of :data:`SPLIT_FILE` for this rank's part; None without tensor parallelism."""
        if ranks.size(Group.TP) == 1:
            return None
        known = {name: where for name, where in self._slices.items() if name not in self._ambiguous}
        about: dict[str, Any] = {
            "tensor_parallel_degree": ranks.size(Group.TP),
            "tensor_parallel_rank": ranks.rank_in(Group.TP),
            "unknown": sorted(self._ambiguous),
            "slices": {
                name: {"shape": list(where.shape), "dim": where.dim, "bounds": list(where.bounds)}
                for name, where in known.items()
            },
        }
        return json.dumps(about, indent=1)
