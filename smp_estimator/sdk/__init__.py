"""The SageMaker SDK: which version is installed, and the parts of it that this package uses."""
