"""Models that tests train: small ones with what makes parallel training hard, and tiny ones of Transformers."""
