"""Scripts that tests start as programs."""
