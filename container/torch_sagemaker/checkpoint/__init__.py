"""``torch.sagemaker.checkpoint``: what scripts use beside the saving and loading itself."""
