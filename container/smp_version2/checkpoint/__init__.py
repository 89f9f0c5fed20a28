"""Sharded checkpoints of version 2, on ``torch.distributed.checkpoint``: saving in the background, rotation, locations in S3."""

from smp_version2.checkpoint import pytorch_calls

# When scripts import a name of this package, since they take PyTorch's functions after that and before ``tsm.init``.
pytorch_calls.install()
