"""Jobs without SageMaker: ``smp-launch run`` detects the launcher or batch system, and starts a script there."""
