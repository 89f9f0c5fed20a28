"""The conversion of a model for tensor parallelism: which modules are distributed, and their replacements."""
