"""The way from ``/opt/ml`` to the ranks: reads the job, starts mpirun, forwards signals, reports why a job failed."""

from smp_launch.isolated import end_without_packages, leave_working_folder

leave_working_folder(__path__[0])
end_without_packages()
