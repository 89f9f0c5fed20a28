"""For ``lightning.fabric.Fabric(strategy=SMPStrategy())``."""

from smp_runtime.libraries.fabric import SMPStrategy

__all__ = ["SMPStrategy"]
