"""Random generators of devices: those that a model may draw on are put back, and no others are touched."""

from __future__ import annotations

import torch
from torch import nn

from smp_emulation.checked import emulated
from smp_runtime.microbatch_state.snapshot import restore_afterwards
from smp_runtime.tensors.random_state import generator_of


def test_a_run_without_a_mark_puts_back_the_generators_of_the_model_and_of_the_current_device():
    with emulated(devices=2):
        torch.cuda.set_device(1)
        model = nn.Dropout()
        model.register_buffer("place", torch.zeros(1, device="cuda:0"))
        states = [torch.cuda.get_rng_state(number) for number in range(2)]
        with restore_afterwards(model):
            for number in range(2):
                torch.rand(3, device=f"cuda:{number}")
        for number, state in enumerate(states):
            assert torch.equal(torch.cuda.get_rng_state(number), state)


def test_cuda_without_a_number_is_the_current_device():
    with emulated(devices=2):
        torch.cuda.set_device(1)
        torch.cuda.manual_seed_all(0)
        generator_of(torch.device("cuda")).manual_seed(7)
        states = [torch.cuda.get_rng_state(number) for number in range(2)]
        torch.cuda.manual_seed_all(7)
        assert torch.equal(torch.cuda.get_rng_state(1), states[1])
        assert not torch.equal(torch.cuda.get_rng_state(0), states[0])
