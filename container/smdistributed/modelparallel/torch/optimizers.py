"""``smp.optimizers``: the optimizers that scripts know from apex."""

from smp_runtime.fused_optimizers import FusedAdam, FusedLAMB, FusedLamb, FusedNovoGrad

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]
