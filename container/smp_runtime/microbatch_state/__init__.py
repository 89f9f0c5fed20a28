"""State that modules keep on themselves while microbatches of a pipeline run interleaved."""
