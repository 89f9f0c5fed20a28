"""What the processes of a job write for one another and for whoever looks on: formats, and reading and writing them."""
