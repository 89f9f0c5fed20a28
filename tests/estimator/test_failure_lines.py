"""What a terminal shows of a failed job: one reason, the place in the script, and the path of the log."""

from __future__ import annotations

import pytest

from smp_estimator.local.failure_lines import hide_failure, shorten_reason

LOG = [
    "step 1",
    "[rank1]: Traceback (most recent call last):",
    "[rank1]:",
    "[rank0]:[W1127 a warning of PyTorch",
    "[rank1]: ValueError: boom",
    "rank 0: the same ValueError",
    "[algo-2] [rank2]: ValueError: boom",
    "smp-launch: failed: rank 1 (algo-1): ValueError: boom",
]

TRACEBACK = """
Traceback (most recent call last):
  File "/tmp/a/algo-1/opt/ml/code/old.py", line 3, in before
    of_a_cause()
KeyError: 3

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/tmp/a/algo-1/opt/ml/code/train.py", line 12, in <module>
    train()
  File "/tmp/a/algo-1/opt/ml/code/train.py", line 7, in train
    loss = model(batch)
           ^^^^^^^^^^^^
  File "/x/site-packages/torch/nn/modules/module.py", line 1, in _call_impl
    return forward_call(*args)
ValueError: boom
"""

HEAD = "Traceback (most recent call last):"
SYNTAX = f'{HEAD}\n  File "/opt/ml/code/a.py", line 2\n    x =\nSyntaxError'
OF_LIBRARY = f'{HEAD}\n  File "/x/lib.py", line 2, in f\n    g()\nE'


def test_lines_of_a_failure_are_left_out_if_the_job_fails() -> None:
    assert list(hide_failure(LOG, lambda: True)) == ["step 1", "[rank0]:[W1127 a warning of PyTorch"]
    assert sorted(hide_failure(LOG, lambda: False)) == sorted(LOG)


def test_lines_of_a_failure_are_shown_if_the_ranks_start_again() -> None:
    again = "smp-launch: failed in step 3: rank 1: boom; the ranks are started again (restart 1 of 2)"
    assert list(hide_failure([*LOG, again, None, *LOG], lambda: True)) == [
        LOG[0],
        LOG[3],
        *LOG[1:3],
        *LOG[4:],
        again,
        None,
        *LOG[0:1],
        LOG[3],
    ]


@pytest.mark.parametrize(
    ("reason", "lines"),
    [
        (
            f"rank 1: ValueError: boom [SMP302]\n{TRACEBACK}",
            [
                "rank 1: ValueError: boom [SMP302]",
                "  at train.py:12, in <module>: train()",
                "  at train.py:7, in train: loss = model(batch)",
                "  to read more: smp-estimator explain SMP302",
            ],
        ),
        (f"bad\n{SYNTAX}", ["bad", "  at a.py:2: x ="]),
        (f"bad\n{SYNTAX.replace('/code/', '/input/data/code/')}", ["bad", "  at a.py:2: x ="]),
        (f"bad\n{OF_LIBRARY}", ["bad"]),
        (f"no file: code 3. The log:\na\nb\n\n{'c' * 200}", ["no file: code 3. The log:", "  b", f"  {'c' * 157}…"]),
        ("", [""]),
    ],
)  # fmt: skip
def test_a_reason_in_few_lines(reason: str, lines: list[str]) -> None:
    assert shorten_reason(reason).split("\n") == lines
