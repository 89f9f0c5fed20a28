"""What tests of the runtime share."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture
def group(tmp_path):
    """A default process group of one rank, and its store."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    if dist.is_initialized():
        dist.destroy_process_group()
