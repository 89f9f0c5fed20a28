"""Transport: structures as bytes, messages and tensors between stages."""
