"""``smp.optimizers``: the optimizers that scripts know from apex, two more for large batches, and Muon."""

from smp_runtime.optim.fused import FusedAdam, FusedLAMB, FusedLamb, FusedNovoGrad
from smp_runtime.optim.large_batch import FusedLANS, FusedLARS
from smp_runtime.optim.matrices.muon import Muon

__all__ = ["FusedAdam", "FusedLAMB", "FusedLANS", "FusedLARS", "FusedLamb", "FusedNovoGrad", "Muon"]
