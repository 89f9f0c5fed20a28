"""For ``lightning.pytorch.Trainer(strategy=SMPStrategy())``."""

from smp_integrations.lightning import SMPStrategy

__all__ = ["SMPStrategy"]
