"""SDK v3: the `ModelTrainer` and `ModelParallel` of `smp_estimator.model_trainer`, and the modules that their jobs need."""
