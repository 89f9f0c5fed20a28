"""The commands of `smp-estimator`: one module for each group of them."""
