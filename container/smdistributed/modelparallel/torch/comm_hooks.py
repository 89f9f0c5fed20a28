"""``smp.comm_hooks``: communication hooks that send gradients in fewer bytes."""

from smp_runtime.data_parallel.gradient_compression import Int8State, SparseState, int8_hook, sparse_hook

__all__ = ["Int8State", "SparseState", "int8_hook", "sparse_hook"]
