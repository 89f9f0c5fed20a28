"""``smp.nn``: the distributed modules."""

from smdistributed.modelparallel.torch.nn import huggingface
from smp_runtime.nn.attention import DistributedAttentionLayer, FlashAttentionLayer
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.nn.embedding import DistributedEmbedding
from smp_runtime.nn.feed_forward import DistributedTransformerOutputLayer
from smp_runtime.nn.layer import DistributedTransformerLayer
from smp_runtime.nn.linear import DistributedLinear
from smp_runtime.nn.lm_head import DistributedTransformerLMHead
from smp_runtime.nn.norm import FusedLayerNorm
from smp_runtime.nn.transformer import DistributedTransformer

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "huggingface",
]
