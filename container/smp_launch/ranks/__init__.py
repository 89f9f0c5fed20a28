"""A rank of a job: its process, and the script that runs in it."""
