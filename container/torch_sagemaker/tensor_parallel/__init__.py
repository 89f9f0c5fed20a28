"""Names of split modules."""
