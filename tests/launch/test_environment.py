"""What a tree becomes: SM_* variables, command line, layout of ranks, without starting anything."""

from __future__ import annotations

import json

import pytest

from smp_config.errors import ConfigError
from smp_config.job import JobSettings
from smp_launch.errors import LaunchError
from smp_launch.machine.hosts import LAYOUT_VARIABLE, Layout, ScriptKind
from smp_launch.machine.locked_folders import LeaderStatus, StatusDir
from smp_launch.ranks.rank import rank_variables
from smp_launch.sagemaker.environment import TrainingEnvironment
from smp_launch.sagemaker.tree import Tree

PARAMETERS = {
    "epochs": 3,
    "lr": 0.5,
    "flag": True,
    "name": "a b",
    "v": 1,
    "mp_parameters": {"ddp": True, "partitions": 1},
}


def read(job, host="algo-1", environ=None):
    return TrainingEnvironment.read(Tree(job.tree(host)), environ or {})


def test_variables(launcher):
    job = launcher.job("", hyperparameters={**PARAMETERS, "sagemaker_container_log_level": 10})
    job.write_config("inputdataconfig", {"train": {"TrainingInputMode": "File"}, "test": {}})
    training = read(job, environ={"TRAINING_JOB_NAME": "my-job"})
    seen = training.variables()
    tree = job.tree()
    assert {name: seen[name] for name in seen if name.startswith(("SM_CHANNEL", "SM_HP_"))} == {
        "SM_CHANNELS": '["test","train"]',
        "SM_CHANNEL_TRAIN": f"{tree}/input/data/train",
        "SM_CHANNEL_TEST": f"{tree}/input/data/test",
        "SM_HP_EPOCHS": "3",
        "SM_HP_LR": "0.5",
        "SM_HP_FLAG": "true",
        "SM_HP_NAME": "a b",
        "SM_HP_V": "1",
        "SM_HP_MP_PARAMETERS": '{"ddp":true,"partitions":1}',
    }
    assert json.loads(seen["SM_HPS"]) == PARAMETERS
    assert (seen["SM_USER_ENTRY_POINT"], seen["SM_MODULE_NAME"]) == ("train.py", "train")
    assert (seen["SM_HOSTS"], seen["SM_CURRENT_HOST"]) == ('["algo-1"]', "algo-1")
    assert (seen["SM_LOG_LEVEL"], seen["SM_NETWORK_INTERFACE_NAME"]) == ("10", "lo")
    assert (seen["SM_MODEL_DIR"], seen["SM_OUTPUT_DATA_DIR"]) == (f"{tree}/model", f"{tree}/output/data")
    assert int(seen["SM_NUM_CPUS"]) >= 1
    framework = json.loads(seen["SM_FRAMEWORK_PARAMS"])
    assert framework["sagemaker_mpi_num_of_processes_per_host"] == 2
    assert "sagemaker_program" not in framework
    whole = json.loads(seen["SM_TRAINING_ENV"])
    assert (whole["job_name"], whole["is_master"]) == ("my-job", True)
    assert whole["channel_input_dirs"]["train"] == seen["SM_CHANNEL_TRAIN"]


def test_hyperparameters_and_code_that_come_by_another_way(launcher, tmp_path):
    job = launcher.job("", hyperparameters={"epochs": 3})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.py").write_text("")
    more = {"epochs": 4, "sagemaker_distributed_dataparallel_enabled": False, "mp_parameters": {"ddp": True}}
    environ = {
        "SAGEMAKER_BASE_DIR": str(job.tree()),
        "SMP_LAUNCH_HYPERPARAMETERS": json.dumps({**more, "sagemaker_program": "other.py"}),
        "SMP_LAUNCH_CODE_DIR": str(tmp_path / "elsewhere"),
    }
    path = job.tree() / "input" / "config" / "hyperparameters.json"
    sent = json.loads(path.read_text())
    del sent["sagemaker_program"]
    path.write_text(json.dumps(sent))
    training = TrainingEnvironment.read(Tree.from_environment(environ), environ)
    assert training.user_hyperparameters == {"epochs": 3, "mp_parameters": {"ddp": True}}, "the platform's file wins"
    assert training.framework_parameters["sagemaker_distributed_dataparallel_enabled"] is False
    assert training.entry_point == "other.py"
    assert training.variables()["SM_MODULE_DIR"] == str(tmp_path / "elsewhere")


def test_arguments(launcher):
    words = read(launcher.job("", hyperparameters=PARAMETERS)).user_arguments()
    assert words == [
        *["--epochs", "3", "--flag", "True", "--lr", "0.5", "--mp_parameters", "ddp=True,partitions=1"],
        *["--name", "a b", "-v", "1"],
    ]


def test_the_host_s_own_name_counts_more_than_the_file(launcher):
    job = launcher.job("", hosts=2)
    seen = read(job, environ={"CURRENT_HOST": "algo-2"})
    assert seen.current_host == "algo-2"
    assert json.loads(seen.variables()["SM_RESOURCE_CONFIG"])["current_host"] == "algo-2"


@pytest.mark.parametrize("name", ["hyperparameters", "resourceconfig", "inputdataconfig"])
@pytest.mark.parametrize(("text", "part"), [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "not an object")])
def test_configuration_files_that_are_wrong(launcher, name, text, part):
    job = launcher.job("")
    path = job.tree() / "input" / "config" / f"{name}.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(job)
    assert part in str(caught.value)
    assert f"{name}.json" in str(caught.value)


def test_a_host_that_is_not_in_the_list(launcher):
    with pytest.raises(ConfigError, match="did you mean 'algo-1'"):
        read(launcher.job(""), environ={"CURRENT_HOST": "algo1"})


@pytest.mark.parametrize(
    ("program", "part"),
    [("trian.py", "did you mean 'train.py'"), (None, "no entry point"), ("notes.txt", "neither a Python nor a shell")],
)
def test_entry_points_that_are_wrong(launcher, program, part):
    job = launcher.job("", hyperparameters={"sagemaker_program": program})
    (job.tree() / "code" / "notes.txt").write_text("")
    with pytest.raises(ConfigError) as caught:
        read(job).entry_point  # noqa: B018 (the property checks)
    assert part in str(caught.value)


def test_a_missing_channel(launcher, tmp_path):
    job = launcher.job("")
    job.write_config("inputdataconfig", {"train": {}})
    (job.tree() / "input" / "data" / "train").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="channel 'train' is missing.*nowhere, which does not exist"):
        read(job).check_channels()


def settings(**distribution):
    return JobSettings.from_distribution(distribution)


def layout(given, hosts=("algo-1", "algo-2"), gpus=0, simulated=True):
    return Layout.of(given, list(hosts), hosts[0], gpus, simulated)


MPI = {"enabled": True, "processes_per_host": 2}


def test_ranks_stand_in_blocks():
    made = layout(settings(mpi=MPI))
    assert made.kind is ScriptKind.MPI
    assert [(made.host_of(r), made.local_rank_of(r)) for r in range(made.world_size)] == [
        ("algo-1", 0),
        ("algo-1", 1),
        ("algo-2", 0),
        ("algo-2", 1),
    ]
    assert made.describe() == "2 hosts (algo-1, algo-2) × 2 processes = 4 ranks"
    assert Layout.from_environment({LAYOUT_VARIABLE: made.to_text()}) == made


@pytest.mark.parametrize(
    ("simulated", "cores", "threads"), [(True, 2, 1), (True, 16, 4), (False, 16, 8), (False, 1, 1)]
)
def test_threads(simulated, cores, threads):
    assert layout(settings(mpi=MPI), simulated=simulated).threads_per_rank(cores) == threads


def test_kinds():
    model = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": {}}}, "mpi": MPI}
    data = {"smdistributed": {"dataparallel": {"enabled": True}}}
    assert layout(settings(**model)).kind is ScriptKind.MODEL_PARALLEL
    assert layout(settings(**data), gpus=8).processes_per_host == 8
    assert layout(settings(**data)).processes_per_host == 1
    assert layout(settings()).kind is ScriptKind.SCRIPT
    assert layout(settings()).world_size == 1


def test_the_leader_s_address():
    made = layout(settings(mpi=MPI))
    assert rank_variables(made, 3, "lo", 8)["MASTER_ADDR"] == "127.0.0.1"
    assert rank_variables(made, 3, "lo", 8)["SMP_PROCESS_MODE"] == "0"  # of several hosts, though simulated
    made = layout(settings(mpi=MPI), simulated=False)
    assert rank_variables(made, 3, "eth0", 8)["MASTER_ADDR"] == "algo-1"


@pytest.mark.parametrize(
    ("distribution", "parts"),
    [
        ({"mpi": {"enabled": True}}, ["processes_per_host is missing", '"processes_per_host": 2']),
        (
            {"smdistributed": {"modelparallel": {"enabled": True, "parameters": {"pipeline_parallel_degree": 4}}}},
            ["mpi is not", '"processes_per_host": 4'],
        ),
        (
            {
                "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"pipeline_parallel_degree": 8}}},
                "mpi": MPI,
            },
            ["needs 8 processes", "has 4"],
        ),
    ],
)
def test_layouts_that_cannot_work(distribution, parts):
    with pytest.raises(ConfigError) as caught:
        layout(settings(**distribution))
    assert all(part in str(caught.value) for part in parts)


def test_the_tree_of_another_host(tmp_path):
    tree = Tree(tmp_path / "algo-1" / "opt" / "ml")
    assert tree.of_host("algo-2", "algo-1") == Tree(tmp_path / "algo-2" / "opt" / "ml")
    with pytest.raises(LaunchError, match="no folder of it is called 'algo-9'"):
        tree.of_host("algo-2", "algo-9")


def test_the_leader_s_end_is_seen_with_and_without_a_word(tmp_path):
    status = StatusDir(tmp_path / "status")
    assert not status.leader_started()
    with status.leading():
        assert status.leader_started()
        status.publish(LeaderStatus(3, "why"))
    assert status.wait_for_end() == LeaderStatus(3, "why")
    with status.leading():
        pass
    assert status.wait_for_end() is None
