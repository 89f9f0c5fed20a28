"""``smp.optimizers``: the optimizers that scripts know from apex, and two more for large batches."""

from smp_runtime.optim.fused import FusedAdam, FusedLAMB, FusedLamb, FusedNovoGrad
from smp_runtime.optim.large_batch import FusedLANS, FusedLARS

__all__ = ["FusedAdam", "FusedLAMB", "FusedLANS", "FusedLARS", "FusedLamb", "FusedNovoGrad"]
