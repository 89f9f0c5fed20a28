"""Migration of SDK v2 calls to SDK v3, in scripts and notebooks: the changes, and notes for a person to review."""

from __future__ import annotations

from smp_estimator.migration.files import Migrated, migrate_file, migrate_sources

__all__ = ["Migrated", "migrate_file", "migrate_sources"]
