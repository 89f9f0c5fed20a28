"""From calls of SDK v2 to calls of SDK v3, in scripts and notebooks: what changes, and what a person has to look at."""

from __future__ import annotations

from smp_estimator.migration.files import Migrated, migrate_file, migrate_sources

__all__ = ["Migrated", "migrate_file", "migrate_sources"]
