"""A running job goes over to other degrees: what every rank has is moved to where it is wanted, rank to rank."""
