"""Somebody outside asks a running job for other degrees: all ranks change after the same update, or none."""

from __future__ import annotations

import json
import threading
import time

import pytest
from click.testing import CliRunner
from support.training.reshape_training import settings_of, train_alone

from smp_config.errors import ConfigError
from smp_estimator.cli.commands import reshape as command
from smp_estimator.cli.main import main
from smp_launch.watch.running import RunningJob
from smp_records.reshaping import answer, ask, read_answer, read_request, takes_requests


def _asked_while_it_trains(folder, config):
    from pathlib import Path

    from support.training.checkpoint_training import Training

    import smdistributed.modelparallel.torch as smp
    from smp_records.reshaping import ask, read_answer

    smp.init(config)  # here, since it is the import that makes the job listen
    path = Path(folder)
    run = Training(divided=True)
    losses = run.train(0, 2)
    said = []
    for request in ({"tensor_parallel_degree": 3}, settings_of("tp2-s2")):
        if smp.rank() == 0:
            ask(path, request)
        found = False
        while not found and len(losses) < 200:
            losses += run.train(len(losses), len(losses) + 1)
            time.sleep(0.05)
            found = smp.allgather(read_answer(path) is not None, smp.WORLD)[0]
        said.append(read_answer(path))
        smp.barrier()
    losses += run.train(len(losses), len(losses) + 2)
    return losses, said, (smp.tp_size(), smp.state.cfg.sharded_data_parallel_degree)


def test_a_job_changes_when_it_is_asked(ranks, tmp_path):
    env = {"SMP_WHEREABOUTS": str(tmp_path), "SMP_RESHAPE_REQUESTS": "1"}
    outcomes = ranks(_asked_while_it_trains, 4, str(tmp_path), settings_of("dp2"), init=False, env=env, timeout=120)
    steps = len(outcomes[0][0])
    expected = ranks(train_alone, 1, steps, config={}, timeout=120)[0]
    for losses, (refused, done), degrees in outcomes:
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5
        assert "tensor_parallel_degree" in refused["error"]
        assert done["parameters"]["tensor_parallel_degree"] == 2
        assert degrees == (2, 2)
    assert read_request(tmp_path) is None


def test_a_second_request_waits_for_the_first(tmp_path):
    ask(tmp_path, {"microbatches": 2})
    with pytest.raises(ConfigError, match="asked to change its degrees already"):
        ask(tmp_path, {"microbatches": 4})
    assert json.loads(read_request(tmp_path)) == {"microbatches": 2}
    answer(tmp_path, {"seconds": 1.0})
    assert (read_request(tmp_path), read_answer(tmp_path)) == (None, {"seconds": 1.0})
    ask(tmp_path, {"microbatches": 4})
    assert read_answer(tmp_path) is None


def test_a_value_that_means_nothing():
    with pytest.raises(ConfigError, match="SMP_RESHAPE_REQUESTS is 'yes'"):
        takes_requests({"SMP_RESHAPE_REQUESTS": "yes"})


@pytest.mark.parametrize(
    ("said", "status", "text"),
    [
        ({"seconds": 0.5, "parameters": {}}, 0, "goes on with"),
        ({"error": "3 ranks do not fit"}, 1, "3 ranks do not fit"),
    ],
)
def test_the_command_tells_what_the_job_says(tmp_path, monkeypatch, said, status, text):
    monkeypatch.setattr(command, "find_running_job", lambda name: RunningJob(name, tmp_path))

    def job():
        while read_request(tmp_path) is None:
            time.sleep(0.01)
        answer(tmp_path, said)

    thread = threading.Thread(target=job)
    thread.start()
    result = CliRunner().invoke(main, ["reshape", "train", "--parameters", '{"microbatches": 2}', "--timeout", "30"])
    thread.join()
    assert (result.exit_code, text in result.output) == (status, True), result.output


def test_the_command_refuses_what_is_no_dictionary(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_running_job", lambda name: RunningJob(name, tmp_path))
    for given, part in (("{", "is no JSON"), ("[]", "is no dictionary")):
        result = CliRunner().invoke(main, ["reshape", "--parameters", given])
        assert result.exit_code == 1
        assert part in result.output
    assert read_request(tmp_path) is None


def test_a_job_that_does_not_listen(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_running_job", lambda name: RunningJob(name, tmp_path))
    result = CliRunner().invoke(main, ["reshape", "--parameters", '{"microbatches": 2}', "--timeout", "0"])
    assert result.exit_code == 1
    assert "SMP_RESHAPE_REQUESTS=1" in " ".join(result.output.split())
