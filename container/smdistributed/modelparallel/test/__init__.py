"""Names of the first library's own tests, which old scripts import."""
