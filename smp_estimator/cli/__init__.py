"""The ``smp-estimator`` command line. Each group of commands has its own file."""
