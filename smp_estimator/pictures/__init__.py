"""Former place of figures, kept for notebooks that import them from here; see `smp_estimator.figures`."""
