"""Attention that scripts of version 2 put into their models, by PyTorch's kernels."""
