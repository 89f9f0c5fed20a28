"""Jobs where there is no SageMaker: what stands around is recognised, and a script started there by ``smp-launch run``."""
