"""The calls of `torch.cuda` that are covered, by topic."""
