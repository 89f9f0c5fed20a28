"""For ``lightning.pytorch.Trainer(strategy=SMPStrategy())``."""

from smp_runtime.libraries.lightning import SMPStrategy

__all__ = ["SMPStrategy"]
