"""Recording of a plain PyTorch script, with DDP, FSDP2 or neither, for ``smp-estimator verify --plain``."""
