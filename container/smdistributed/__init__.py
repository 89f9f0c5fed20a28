"""The names that training scripts import; each file here only forwards to ``smp_runtime``."""
