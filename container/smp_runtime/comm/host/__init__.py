"""Ranks of one host exchange tensors through memory that they share."""
