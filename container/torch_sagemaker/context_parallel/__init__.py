"""Context parallelism of models that are not transformed."""
