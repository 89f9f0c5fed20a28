"""Names of scripts for version 2; the logic is in ``smp_version2.checkpoint``."""

from smp_version2.checkpoint.locations import format_s3_path, get_s3_region_from_uri, is_s3_uri, parse_s3_uri
from smp_version2.checkpoint.s3_filesystem import S3FileSystem, retry_with_jitter

__all__ = [
    "S3FileSystem",
    "format_s3_path",
    "get_s3_region_from_uri",
    "is_s3_uri",
    "parse_s3_uri",
    "retry_with_jitter",
]
