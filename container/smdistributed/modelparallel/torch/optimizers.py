"""``smp.optimizers``: the optimizers that scripts know from apex."""

from smp_runtime.optim.fused import FusedAdam, FusedLAMB, FusedLamb, FusedNovoGrad

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]
