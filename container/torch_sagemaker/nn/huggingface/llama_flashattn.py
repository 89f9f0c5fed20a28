"""The attention of Llama; needs Transformers."""

from smp_version2.attention.llama import LlamaFlashAttention

__all__ = ["LlamaFlashAttention"]
