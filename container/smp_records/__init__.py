"""Records that the processes of a job write for one another and for observers: formats, and reading and writing them."""
