"""Memory in a plan: of one GPU by kind, of activations, of a host."""
