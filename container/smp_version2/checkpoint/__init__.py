"""Sharded checkpoints of version 2, on ``torch.distributed.checkpoint``: saving in the background, rotation, locations in S3."""

from smp_version2.checkpoint import optimizer_state

# When scripts import a name of this package, since they take PyTorch's function after that and before ``tsm.init``.
optimizer_state.install()
