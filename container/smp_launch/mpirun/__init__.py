"""mpirun: its command line, and the job that it runs."""
