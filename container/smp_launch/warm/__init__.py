"""Ranks that are started again without their imports: forked from a process of the host that has made them."""
