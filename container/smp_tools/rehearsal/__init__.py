"""A rehearsal: the script of a large job in one process for each kind of rank, with memory that is never written."""
