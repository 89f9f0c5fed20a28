"""What an estimator is told: checked on the notebook, typed, and translated into what a job carries."""
