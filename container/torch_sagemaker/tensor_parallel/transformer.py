"""Names by which scripts recognize blocks."""

from smp_version2.layer_classes import TETransformerLayer, TransformerLayer

__all__ = ["TETransformerLayer", "TransformerLayer"]
