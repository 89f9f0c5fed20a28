"""``torch.sagemaker.distributed.checkpoint``: sharded checkpoints; the logic is in ``smp_version2.checkpoint``."""
