"""Parts of a GPU's peaks that kernels reach: their fields, and those that were fitted to published measurements."""
