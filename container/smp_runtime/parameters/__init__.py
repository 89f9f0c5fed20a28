"""Parameters: global names and places, precision, late creation, and the optimizer shards updated instead of them."""
