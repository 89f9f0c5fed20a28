"""Why a job has failed: the first cause, and what goes into `/opt/ml/output/failure`."""
