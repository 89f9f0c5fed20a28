"""The files of a checkpoint: read, checked and converted without a running job."""
