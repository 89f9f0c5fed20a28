"""Lets ``import torch.sagemaker`` find version 2 where these packages are on ``PYTHONPATH`` instead of being installed."""

import torch_sagemaker_finder

torch_sagemaker_finder.run_hidden(__file__)
