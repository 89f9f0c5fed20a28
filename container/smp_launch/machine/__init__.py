"""This host, below any job: its processes, pipes, locked folders and network."""
