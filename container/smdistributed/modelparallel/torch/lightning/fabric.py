"""For ``lightning.fabric.Fabric(strategy=SMPStrategy())``."""

from smp_integrations.fabric import SMPStrategy

__all__ = ["SMPStrategy"]
