"""Pipeline parallelism: any module, split over several ranks, with microbatches in flight."""
