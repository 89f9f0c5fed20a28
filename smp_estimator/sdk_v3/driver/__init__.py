"""Files that a job of ``ModelTrainer`` carries and its containers start."""
