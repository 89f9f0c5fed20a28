"""FP8 in jobs of version 2, and modules of ``transformer_engine`` where it is not installed."""
