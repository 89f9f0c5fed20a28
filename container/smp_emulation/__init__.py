"""CUDA on machines without a GPU, for tests of scripts and of this library; nothing of it runs in a job on GPUs."""
