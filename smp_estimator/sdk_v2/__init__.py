"""SDK v2: estimators that extend the SDK's."""
