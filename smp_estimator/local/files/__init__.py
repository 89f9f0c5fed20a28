"""Files of a job on this machine: its code, channels, artifacts, and where they come from."""
