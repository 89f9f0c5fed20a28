"""The way from ``/opt/ml`` to the ranks: reads the job, starts mpirun, forwards signals, tells why a job failed."""
