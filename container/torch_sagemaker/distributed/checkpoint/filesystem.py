"""Names of scripts for version 2; the logic is in ``smp_version2.checkpoint.filesystem``."""

from smp_version2.checkpoint.filesystem import (
    DistributedFileSystemReader,
    DistributedFileSystemWriter,
    path_to_file_system,
)

__all__ = [
    "DistributedFileSystemReader",
    "DistributedFileSystemWriter",
    "path_to_file_system",
]
