"""Attention over a sequence that the ranks of a context group share out, on plain local tensors.

:func:`attend` equals ``torch.nn.functional.scaled_dot_product_attention`` of the whole sequence, for this rank's rows.
"""

from smp_runtime.context.attention.attend import METHODS, attend, attend_with_logsumexp
from smp_runtime.context.attention.balance import balance_documents, zigzag_indices

__all__ = ["METHODS", "attend", "attend_with_logsumexp", "balance_documents", "zigzag_indices"]
