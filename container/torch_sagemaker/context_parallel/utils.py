"""Groups of ``transformer_engine``'s modules."""

from smp_version2.attention.engine_groups import setup_transformer_engine_cp_groups

__all__ = ["setup_transformer_engine_cp_groups"]
