"""The SageMaker SDK: which version is installed, and what this package uses of it."""
