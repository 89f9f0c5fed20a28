"""Tensor parallelism: single layers split over ranks, chosen by scope or registration."""
