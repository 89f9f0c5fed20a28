"""SMDDP: a backend of ``torch.distributed`` with an all-gather that sends every byte between two hosts only once."""

from smp_runtime.smddp.registration import BACKEND, register

__all__ = ["BACKEND", "register"]
