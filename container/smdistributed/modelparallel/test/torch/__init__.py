"""Those for PyTorch."""
