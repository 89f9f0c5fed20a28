"""CUDA without a GPU: calls of ``torch.cuda`` that act on CPU tensors, so that a GPU script can be tried on any machine."""

_installed = False


def is_active() -> bool:
    """Return whether this process emulates ``torch.cuda`` on the CPU."""
    return _installed
