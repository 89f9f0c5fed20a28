"""The command line, in process: what it prints, its exit codes, and that nothing hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.platform.command_line import call, flat

from smp_estimator.cli import main as cli_main

GOOD = {
    "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"ddp": True, "tensor_parallel_degree": 4}}},
    "mpi": {"enabled": True, "processes_per_host": 8},
}


P4D = ("--instance-type", "ml.p4d.24xlarge")
SHAPE = '{"layers": 2, "hidden": 64, "heads": 2, "vocabulary": 100, "sequence": 16, %s}'


def test_every_command_explains_itself() -> None:
    listed = call("--help").output
    for command in ("validate", "plan", "suggest", "topology", "run", "doctor", "images", "models", "migrate"):
        assert command in listed
        assert "Usage" in call(command, "--help").output


# -- validate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [json.dumps(GOOD), repr(GOOD)])
def test_validate_reads_json_and_python(text: str) -> None:
    said = flat(call("validate", "-", "--instance-count", "4", input=text))
    assert "valid on 4 × ml.p4d.24xlarge: 32 processes = pipeline 1 × tensor 4 × 8 replicas" in said


def test_validate_reads_files_with_their_cluster(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"distribution": GOOD, "instance_type": "ml.p3.16xlarge", "instance_count": 2}))
    assert "valid on 2 × ml.p3.16xlarge: 16 processes" in flat(call("validate", str(file)))


def test_validate_says_that_it_does_not_know_an_instance() -> None:
    said = flat(call("validate", "-", "--instance-type", "ml.p9.large", input='{"ddp": True}'))
    assert "warning no instance type ml.p9.large is known here" in said


def test_validate_reads_parameters_alone() -> None:
    old = '{"partitions": 2, "instance_type": "ml.p3.16xlarge"}'
    assert "on 1 × ml.p3.16xlarge: 8 processes = pipeline 2" in flat(call("validate", "-", input=old))
    text = '{"ddp": True, "sharded_data_parallel_degree": 8, "fp16": True}'
    assert "sharded over 8" in flat(call("validate", "-", input=text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{'ddp': open('x')}", "neither JSON"),
        ("[1, 2]", "a distribution is a dictionary"),
        ('{"ddp": true, "tensor_paralel_degree": 2}', "did you mean 'tensor_parallel_degree'"),
        ('{"ddp": true, "tensor_parallel_degree": 16}', "16 processes"),
        ('{"smdistributd": {}}', "did you mean 'smdistributed'"),
        (json.dumps({**GOOD, "mpi": {"enabled": True, "processes_per_host": 16}}), "has 8 GPUs"),
        (json.dumps({"smdistributed": GOOD["smdistributed"]}), "mpi is missing"),
        ('{"distribution": null}', "distribution is None; strategies are read from its keys"),
        (json.dumps({"distribution": GOOD, "instance_count": "2"}), "instance_count is '2', a str"),
        (json.dumps({"distribution": GOOD, "instance_type": ["a"]}), "instance_type is ['a'], a list"),
        ('{"ddp": true, "microbatches": 1e400}', "the number 1e400 is beyond the range of floating point numbers"),
    ],
)
def test_validate_refuses(text: str, said: str) -> None:
    assert said in flat(call("validate", "-", input=text, code=1))


def test_validate_checks_gpus_that_only_the_catalogue_knows() -> None:
    more = json.dumps({**GOOD, "mpi": {"enabled": True, "processes_per_host": 16}})
    assert "ml.p5en.48xlarge has 8 GPUs" in flat(
        call("validate", "-", "--instance-type", "ml.p5en.48xlarge", input=more, code=1)
    )


def test_validate_warns() -> None:
    said = flat(call("validate", "-", "--instance-type", "ml.p9.96xlarge", input=json.dumps(GOOD)))
    assert "warning instance_type ml.p9.96xlarge is not in this version's catalogue" in said
    parameters = {"ddp": True, "tensor_parallel_degree": 16, "prescaled_batch": True}
    wide = flat(call("validate", "-", "--instance-count", "2", input=json.dumps(parameters)))
    assert "spread over 2 hosts" in wide


# -- plan, suggest, topology -------------------------------------------------------------------------------


def test_plan_says_what_fits() -> None:
    options = ["--instance-count", "2", "--batch", "4", "--checkpointing", "each"]
    parameters = '{"ddp": true, "fp16": true, "sharded_data_parallel_degree": %d}'
    fits = flat(call("plan", "gpt-neox-20b", *options, "--parameters", parameters % 16))
    assert "30.6 GB of 42.9 (71%), fits" in fits
    not_fit = flat(call("plan", "gpt-neox-20b", *options, "--parameters", parameters % 8, code=1))
    assert "does not fit" in not_fit
    assert "Error" not in not_fit
    assert '"sharded_data_parallel_degree": 16' in not_fit


def test_plan_as_json() -> None:
    found = json.loads(call("plan", "gpt2", "--json").output)
    assert found["verdict"] == "fits"
    assert found["model"]["parameters"] == 124_439_808
    stage = found["stages"][0]
    others = {"stage", "layers", "total", "at_loss", "in_optimizer_step"}
    kinds = [size for kind, size in stage.items() if kind not in others]
    assert found["total_bytes"] == max(sum(kinds), stage["in_optimizer_step"]) == sum(kinds)


@pytest.mark.parametrize("model", ["7b", "7e9", "7000000000"])
def test_plan_takes_counts(model: str) -> None:
    assert "7B parameters" in call("plan", model, "--instance-type", "ml.p4d.24xlarge", code=1).output


def test_plan_writes_large_and_small_counts_out() -> None:
    assert "1,000B parameters: " in call("plan", "1000b", code=1).output
    assert "350M parameters" in call("plan", "350m").output


def test_plan_takes_shapes_and_other_devices() -> None:
    shape = '{"layers": 2, "hidden": 64, "heads": 2, "vocabulary": 100, "sequence": 16}'
    said = flat(call("plan", shape, "--instance-type", "local", "--processes", "2", "--gpu-memory", "1"))
    assert "2 layers × 64" in said
    assert "of 1.1 (" in said
    assert "lacks sequence;" in flat(call("plan", shape.replace(', "sequence": 16', ""), code=1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpt3"], "did you mean 'gpt2'"),
        (["gpt2", "--parameters", "nowhere.json"], "no such file"),
        (["gpt2", "--parameters", '{"ddp": tru}'], "neither JSON"),
        (["gpt2", "--instance-type", "ml.p9.xlarge"], "give --processes (and --gpu-memory for a verdict)"),
        (["nan"], "the model has nan parameters"),
        (["inf"], "the model has inf parameters"),
        (["gpt2", "--gpu-memory", "0"], "--gpu-memory is 0; it is the memory of one GPU in GiB: give more than 0"),
        (["gpt2", "--gpu-memory", "-1"], "--gpu-memory is -1;"),
        (["gpt2", "--gpu-memory", "inf"], "--gpu-memory is inf;"),
        ([SHAPE % '"feed_forward": "x"'], "feed_forward is 'x'; it is the width inside the MLP"),
        ([SHAPE % '"gated": "no"'], "gated is 'no'; the shape has it or not"),
        ([SHAPE % '"weights": [1]'], "the shape in the dictionary has unknown weights"),
    ],
)
def test_plan_refuses(arguments: list[str], said: str) -> None:
    assert said in flat(call("plan", *arguments, code=1))


def test_suggest() -> None:
    said = flat(call("suggest", "gpt2-60b", *P4D, "--instance-count", "32", "--batch", "7"))
    assert "'tensor_parallel_degree': 8" in said
    assert "← chosen" in said
    found = json.loads(call("suggest", "gpt2", *P4D, "--json").output)
    assert found["parameters"] == {"ddp": True, "bf16": True}
    call("suggest", "gpt-neox-65b", "--instance-type", "ml.g5.xlarge", "--instance-count", "1", code=1)


def test_suggest_answers_on_what_a_model_fits() -> None:
    cluster = json.loads(call("suggest", "gpt-neox-20b", "--json").output)
    assert (cluster["instance_count"], len(cluster["clusters"])) == (1, 6)
    many = json.loads(call("suggest", "gpt-neox-20b", *P4D, "--json").output)
    assert many["instance_count"] == 2
    said = flat(call("suggest", "gpt-neox-65b", *P4D, "--instance-count", "1", code=1))
    assert "nothing fits on 1 × ml.p4d.24xlarge; the nearest is shown below would fit on" in said
    assert "6 × ml.p4d.24xlarge" in said
    assert "chosen" not in said.split("verdict nothing")[0]


def test_plan_reads_configurations_and_data_sets(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (str(tmp_path / "config.json"), str(tmp_path)):
        found = json.loads(call("plan", given, "--samples", "5000", "--batch", "8", "--epochs", "3", "--json").output)
        assert found["model"]["parameters"] == 124_439_808
        assert (found["epochs"]["steps"], found["epochs"]["total_steps"], found["epochs"]["dropped"]) == (78, 234, 8)
        assert found["training"]["hours"] == 234 * found["step_time"]["seconds"] / 3600
    assert "there is no file nowhere/config.json" in flat(call("plan", "nowhere/config.json", code=1))


def test_plan_of_a_step_that_was_measured() -> None:
    said = flat(call("plan", "gpt2", "--steps", "3600", "--step-seconds", "0.5", "--price", "ml.p4d.24xlarge=20"))
    assert "training 3,600 steps of 0.5 s, as given: 30 minutes and 10.00 USD" in said
    assert "--step-seconds is 0.0; it is the time" in flat(call("plan", "gpt2", "--step-seconds", "0", code=1))
    assert "--steps is 3 and epochs is 2" in flat(call("plan", "gpt2", "--steps", "3", "--epochs", "2", code=1))


def test_plan_takes_a_batch_from_the_microbatches() -> None:
    parameters = '{"pipeline_parallel_degree": 2, "microbatches": 4}'
    assert "the batch is one sample per microbatch, as none was given" in flat(
        call("plan", "gpt2", "--parameters", parameters)
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "gpt2", "--processes", "99"], "--processes is 99, but ml.p4d.24xlarge has 8 GPUs"),
        (["plan", "gpt2", "--checkpointing", "all"], "--checkpointing is 'all'; it is the strategy"),
        (["plan", "gpt2", "--optimizer", "adams"], "--optimizer is 'adams'; its state"),
        (["plan", "gpt2", "--tokens", "9"], "--tokens is 9, less than one sample"),
        (["suggest", "gpt2", "--gpu-memory", "4"], "--gpu-memory was given, but no --instance-type"),
        (["suggest", "gpt2", "--instance-type", "x", "--processes", "2"], "give --gpu-memory, the memory of one GPU"),
        (["suggest", "300b", "--instance-count", "1"], "1 instances of any current type"),
    ],
)
def test_errors_call_options_by_their_names(arguments: list[str], said: str) -> None:
    assert said in flat(call(*arguments, code=1))


def test_topology_draws_the_published_example(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "f.png"
    said = call("topology", "--world", "32", "--tp", "4", "--sdp", "4", "--png", str(picture)).output
    assert "0, 4, 8, 12 " in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "cannot be divided" in flat(call("topology", "--world", "6", "--tp", "4", code=1))


# -- run -----------------------------------------------------------------------------------------------------


class Fake:
    """Stands for the estimator and keeps what it was given."""

    made: dict[str, Any]
    fitted: Any
    failure: Exception | None = None

    def __init__(self, **settings: Any) -> None:
        type(self).made = settings

    def fit(self, channels: Any) -> None:
        type(self).fitted = channels
        if self.failure:
            raise self.failure


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    import smp_estimator

    kind = type("FakeEstimator", (Fake,), {})
    monkeypatch.setattr(smp_estimator, "SMPEstimator", kind, raising=False)
    return kind


def test_run_hands_everything_on(fake: type[Fake], script: Path, tmp_path: Path) -> None:
    data = tmp_path / "data with space"
    data.mkdir()
    call(
        "run",
        str(script / "train.py"),
        *("--processes", "2", "--hosts", "3", "--source-dir", str(script), "--output", str(tmp_path / "out")),
        *("--hyperparameter", "steps=300", "--hyperparameter", "rate=1e-3", "--hyperparameter", "name=a=b"),
        *("--channel", f"train={data}", "--parameters", '{"ddp": True, "microbatches": 2}'),
        *("--env", "SMP_TIMELINE=3", "--env", "A=b=c", "--checkpoints", str(tmp_path / "kept")),
        *("--", "--lr", "0.1", "--flag", "-x", "two words", "--processes"),
    )
    assert fake.made["entry_point"] == "train.py"
    assert fake.made["source_dir"] == str(script)
    assert fake.made["instance_count"] == 3
    assert fake.made["hyperparameters"] == {"steps": 300, "rate": 0.001, "name": "a=b"}
    assert fake.made["distribution"]["mpi"] == {"enabled": True, "processes_per_host": 2}
    model = fake.made["distribution"]["smdistributed"]["modelparallel"]
    assert model == {"enabled": True, "parameters": {"ddp": True, "microbatches": 2}}
    assert fake.made["output_path"] == f"file://{tmp_path / 'out'}"
    assert fake.fitted == {"train": f"file://{data}"}
    assert fake.made["checkpoint_s3_uri"] == f"file://{tmp_path / 'kept'}"
    words = json.loads(fake.made["environment"].pop("SMP_SCRIPT_ARGUMENTS"))
    assert words == ["--lr", "0.1", "--flag", "-x", "two words", "--processes"]
    assert fake.made["environment"] == {"SMP_TIMELINE": "3", "A": "b=c"}


def test_run_refuses_in_the_words_of_its_options(script: Path) -> None:
    words = [
        "run",
        str(script / "train.py"),
        "--processes",
        "3",
        "--parameters",
        '{"tensor_parallel_degree": 2, "ddp": true}',
    ]
    said = flat(call(*words, code=1))
    assert "3 processes = --processes 3 × --hosts 1; set --processes to 2" in said
    assert "[SMP102]" in said


def test_run_says_which_variables_of_the_shell_it_leaves_out(
    fake: type[Fake], script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = str(script / "train.py")
    monkeypatch.setenv("SMP_TIMELINE", "3")  # handed on
    assert "not taken" not in call("run", train).output
    monkeypatch.setenv("SMP_CHECKPOINT_DIR", "/somewhere")
    monkeypatch.setenv("SMP_RANK", "3")
    said = flat(call("run", train))
    assert "since the launcher sets them: SMP_CHECKPOINT_DIR, SMP_RANK; --checkpoints DIR names the folder" in said
    said = flat(call("run", train, "--checkpoints", str(script)))
    assert "since the launcher sets it: SMP_RANK" in said
    assert "SMP_CHECKPOINT_DIR" not in said


def test_run_says_where_the_script_s_words_belong(fake: type[Fake], script: Path) -> None:
    said = flat(call("run", str(script / "train.py"), "--lr", "0.1", code=2))
    assert "run has no option --lr; if it is meant for the script, write it behind --: run SCRIPT -- --lr …" in said


def test_run_reads_its_own_addresses(fake: type[Fake], script: Path, tmp_path: Path) -> None:
    from smp_estimator.local.files.uris import path_of

    for name in ("my out", "my%20out", "100% é", "a#b?c"):
        call("run", str(script / "train.py"), "--output", str(tmp_path / name))
        assert path_of(fake.made["output_path"]) == tmp_path / name
        (tmp_path / name).mkdir()
        assert path_of(fake.made["output_path"]) == tmp_path / name


def test_run_shows_the_failure_and_fails(fake: type[Fake], script: Path) -> None:
    fake.failure = ValueError("rank 1: ZeroDivisionError")
    assert "Error: rank 1: ZeroDivisionError" in call("run", str(script / "train.py"), code=1).output
    assert fake.fitted is None
    assert fake.made["entry_point"] == str(script / "train.py")


def test_run_introduces_a_failure_once(fake: type[Fake], script: Path) -> None:
    fake.failure = ValueError("Error for Training job x: Failed. Reason: rank 1: boom\nThe whole log is in /x/job.log")
    said = call("run", str(script / "train.py"), code=1).output
    assert said.endswith("Error: Training job x: Failed. Reason: rank 1: boom\nThe whole log is in /x/job.log\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--channel", "train"], "write --channel name=value"),
        (["--channel", "train=/no/such/folder"], "is no directory"),
        (["--hyperparameter", "=3"], "write --hyperparameter name=value"),
        (["--env", "A"], "write --env name=value"),
        (["--env", "SMP_CHECKPOINT_DIR=/x"], "sets SMP_CHECKPOINT_DIR in every rank itself: leave it out, and give"),
        (["--source-dir", "/usr"], "does not lie in --source-dir"),
    ],
)
def test_run_refuses(fake: type[Fake], script: Path, arguments: list[str], said: str) -> None:
    assert said in flat(call("run", str(script / "train.py"), *arguments, code=1))


@pytest.mark.job
def test_run_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real job of two processes, from the command line to the model archive."""
    pytest.importorskip("mpi4py")
    script, data = tmp_path / "train.py", tmp_path / "data"
    data.mkdir()
    (data / "word.txt").write_text("hello")
    script.write_text(
        "import argparse, os, pathlib\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--steps', type=int)\n"
        "steps, rest = parser.parse_known_args()\n"
        "word = (pathlib.Path(os.environ['SM_CHANNEL_TRAIN']) / 'word.txt').read_text()\n"
        "print('rank', os.environ['SMP_RANK'], 'of', os.environ['SMP_WORLD_SIZE'], word, steps.steps, rest[-2:])\n"
        "print('environment', os.environ['GIVEN'], os.environ['SMP_OF_THE_SHELL'])\n"
        "pathlib.Path(os.environ['SMP_CHECKPOINT_DIR'], 'kept.txt').write_text('x')\n"
        "pathlib.Path(os.environ['SM_MODEL_DIR'], 'x.txt').write_text('x')\n"
    )
    words = ["run", str(script), "--processes", "2", "--hyperparameter", "steps=7", "--channel", f"train={data}"]
    words += ["--output", str(tmp_path / "out"), "--env", "GIVEN=here", "--checkpoints", "checkpoints"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMP_OF_THE_SHELL", "kept")
    said = call(*words, "--", "--flag", "two words").output
    for rank in (0, 1):
        assert f"rank {rank} of 2 hello 7 ['--flag', 'two words']" in said
    assert said.count("environment here kept") == 2
    assert (tmp_path / "checkpoints/kept.txt").exists()
    (model,) = (tmp_path / "out").rglob("model.tar.gz")
    assert said.count(f"file://{model}") == 1, "said once"


# -- help ----------------------------------------------------------------------------------------------------


def test_help_lists_every_command_in_one_group() -> None:
    listed = [name for names in cli_main.GROUPS.values() for name in names]
    assert sorted(listed) == sorted(cli_main.main.commands)
    said = call("--help").output
    assert all(f"{title}:" in said for title in cli_main.GROUPS)
    assert said.index("Begin:") < said.index("init") < said.index("Before a job:") < said.index("validate")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    said = call("completion", shell).output
    assert "_SMP_ESTIMATOR_COMPLETE" in said
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=said, text=True, check=True)


def test_completion_knows_commands_and_options() -> None:
    from click.shell_completion import BashComplete

    complete = BashComplete(cli_main.main, {}, "smp-estimator", "_SMP_ESTIMATOR_COMPLETE")
    assert [item.value for item in complete.get_completions([], "pl")] == ["plan"]
    assert [item.value for item in complete.get_completions(["init"], "--str")] == ["--strategy"]
    assert "tensor" in [item.value for item in complete.get_completions(["init", "--strategy"], "te")]


def test_the_cluster_has_the_same_short_names_everywhere() -> None:
    long = call("plan", "gpt2", "--instance-type", "ml.p4de.24xlarge", "--instance-count", "2").output
    assert call("plan", "gpt2", "--instance", "ml.p4de.24xlarge", "--count", "2").output == long
    assert "2 × ml.p4de.24xlarge" in long
    for command in ("plan", "suggest", "rehearse", "validate"):
        said = call(command, "--help").output
        assert "--instance-type, --instance" in said, command
        assert "--instance-count, --count" in said, command


_BARE = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numpy", "torch", "boto3", "botocore", "sagemaker", "matplotlib", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
from smp_estimator.cli.main import main
main(sys.argv[1:])
"""


def test_the_commands_come_without_any_extra() -> None:
    """Who lacks something asks `doctor` where it is: the command needs only what every installation has."""
    done = subprocess.run([sys.executable, "-c", _BARE, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
