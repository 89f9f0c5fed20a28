"""Settings of an estimator: checked on the notebook, typed, and translated into the job's hyperparameters."""
