"""The search for degrees and for a cluster: what to try in which order, how many instances, and what was found."""
