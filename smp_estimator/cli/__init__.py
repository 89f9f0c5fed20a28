"""The command line ``smp-estimator``: one file for its groups of commands each, and what they tell apart."""
