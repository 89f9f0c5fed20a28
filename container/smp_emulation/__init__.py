"""CUDA without a GPU: calls of ``torch.cuda`` that act on CPU tensors, so that a GPU script can be tried on any machine."""

_installed = False


def is_active() -> bool:
    """Whether ``torch.cuda`` of this process answers for a GPU that is not there."""
    return _installed
