"""Who answers a module's call."""

from __future__ import annotations

import torch
from torch import nn

from smp_runtime.tensors import module_calls


class _Answer:
    def __init__(self, result, is_elsewhere=False):
        self.result, self.is_elsewhere = result, is_elsewhere

    def __call__(self, *args, **kwargs):
        return self.result


def test_a_call_goes_to_whoever_answers_and_back_to_the_module():
    module, other = nn.Identity(), nn.Identity()
    here = _Answer("here")
    module_calls.answer(module, here)
    assert (module(1), other(1)) == ("here", 1)
    module_calls.answer_itself(module, instead_of=_Answer("another"))
    assert module(1) == "here"
    module_calls.answer_itself(module, instead_of=here)
    assert module(1) == 1
    assert module_calls.answer_of(module) is None


def test_another_rank_goes_before_what_is_done_here():
    module = nn.Identity()
    for answers in (["here", "there"], ["there", "here"], ["there", "here", "there"]):
        for name in answers:
            module_calls.answer(module, _Answer(name, is_elsewhere=name == "there"))
        assert module("input") == "there", answers
        module_calls.answer_itself(module)
        assert module("input") == "input"


def test_a_modules_own_call_runs_its_hooks_but_asks_nobody_else():
    module = nn.Linear(2, 2)
    seen = []
    module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    module_calls.answer(module, _Answer("somebody else"))
    result = module_calls.own_call(module)(torch.ones(1, 2))
    assert seen == [result]
    assert module(torch.ones(1, 2)) == "somebody else"
