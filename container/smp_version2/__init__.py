"""Version 2 of the library's interface (``import torch.sagemaker``), on PyTorch's own FSDP."""
