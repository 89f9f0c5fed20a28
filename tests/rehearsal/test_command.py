"""``smp-estimator rehearse``: its tables, its file, and what it finds before anything is launched."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from smp_config import ConfigError
from smp_config.machine.instances import instance
from smp_estimator.cli.main import main
from smp_estimator.planning import Verdict
from smp_estimator.rehearsal import RehearsalFailed, Rehearsed, rehearse
from smp_estimator.rehearsal.figures import links_of, save_links, save_memory
from smp_estimator.rehearsal.rehearse import _environment
from smp_records.rehearsal import (
    CollectiveCount,
    KindReport,
    LinkCount,
    MemoryOverTime,
    ModuleWork,
    PeakHolder,
    Rehearsal,
    RehearsalRequest,
    TimedBlock,
    read_request,
)

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("gpt_script.py")
GIB = 2**30


def kind(stage, peak, **given):
    holder = PeakHolder(
        kind="activation", module="blocks.3", phase="forward", operation="addmm.default", count=4, bytes=peak
    )
    values = {
        "stage": stage,
        "rank": stage,
        "stands_for": 8,
        "parameters": 10,
        "steps": 3,
        "peak_bytes": peak,
        "peak_phase": "backward",
        "peak_module": f"blocks.{stage}",
        "peak_line": "train.py:7",
        "resident_bytes": 1,
        "first_step_peak_bytes": peak,
        "classes": {"activation": peak},
        "holders": [holder],
        "curve": {"seconds": [0.0, 0.2], "owners": {"activation": [0, peak], "parameter": [5, 5]}},
        "collectives": [],
        "links": [],
        "work": [],
        "step_seconds": 0.5,
    }
    return KindReport(**{**values, **given})


def rehearsed(*kinds, memory=40 * GIB):
    request = RehearsalRequest(hosts=4, ranks_per_host=8, kinds=len(kinds), instance_type="ml.p4d.24xlarge", folder="")
    return Rehearsed(Rehearsal(request=request, mp_parameters={}, kinds=list(kinds), seconds=7.0), memory)


def test_the_fullest_stage_decides():
    found = rehearsed(kind(0, 10 * GIB), kind(1, 20 * GIB), kind(2, 30 * GIB), kind(3, 41 * GIB))
    assert found.verdict is Verdict.DOES_NOT_FIT
    assert [found.verdict_of(one) for one in found.rehearsal.kinds[:3]] == [Verdict.FITS] * 3
    text = str(found)
    assert "stage 3 holds 41.00 GiB, 102% of 40.00 GiB, in backward at blocks.3" in text
    assert "does not fit" in text
    assert "4 × ml.p4d.24xlarge, 32 ranks" in text


def test_what_a_script_keeps_in_host_memory_needs_no_gpu():
    found = rehearsed(kind(0, 50 * GIB, classes={"activation": 36 * GIB, "other": 14 * GIB}))
    assert found.fraction == pytest.approx(0.9)
    assert found.verdict is Verdict.TIGHT
    assert rehearsed(kind(0, GIB), memory=None).verdict is Verdict.UNKNOWN


def test_hours_and_price_follow_from_the_pipeline_s_order_and_what_is_done_around_it():
    planned = kind(1, GIB, step_seconds=5.0, pipeline_seconds=6.0, pipeline_idle={0: 0.6, 1: 0.5})
    request = RehearsalRequest(hosts=10, ranks_per_host=8, kinds=2, instance_type="ml.p4d.24xlarge", folder="")
    made = Rehearsal(request=request, mp_parameters={}, kinds=[kind(0, GIB, step_seconds=3.0), planned], seconds=1.0)
    found = Rehearsed(made, 40 * GIB, 450)
    # Stage 1 computes 3 of the 6 seconds in the pipeline, and 2 outside of it.
    assert found.rehearsal.step_seconds == pytest.approx(8.0)
    assert found.training_hours == pytest.approx(1.0)
    assert found.training_usd == pytest.approx(10 * instance("ml.p4d.24xlarge").usd_per_hour)
    assert found.goodput.work == pytest.approx(3600)
    assert found.goodput.usd_per_hour == pytest.approx(10 * instance("ml.p4d.24xlarge").usd_per_hour)
    assert found.to_dict()["found"]["goodput"]["hours"] >= 1
    assert "a checkpoint every" in str(found)
    assert "450 steps take 1.0 h" in str(found)
    assert "idle 60%, 50%" in str(found)


def test_a_stage_without_parameters_is_told():
    found = rehearsed(kind(0, GIB), kind(1, GIB, parameters=0))
    assert [one.stage for one in found.unused] == [1]
    assert "stage 1 holds no parameters" in str(found)
    assert "no parameters" not in str(rehearsed(kind(0, GIB)))


def test_memory_and_links_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"step": 2, "phase": "backward", "kind": "all_reduce", "group": "dp", "ranks": 8, "hosts": 2, "calls": 3}
    sends = {**row, "payload_bytes": 100, "sent_bytes": 175, "messages": 42}
    link = {"step": 2, "stage": 1, "same_host": True, "messages": 4, "tensor_bytes": 4096}
    found = rehearsed(kind(0, 10 * GIB, collectives=[sends], links=[link]), kind(1, 20 * GIB))
    assert save_memory(found, tmp_path / "memory.png").stat().st_size > 1000
    assert save_links(found, tmp_path / "links.png").stat().st_size > 1000
    traffic = links_of(found)
    assert {(one.source, one.target, one.sent_bytes, one.same_host) for one in traffic} == {
        ("stage 0", "stage 1", 4096, True),
        ("stage 0", "dp", 175, False),
    }


def test_a_report_is_the_same_after_json():
    found = rehearsed(kind(0, GIB), kind(1, 41 * GIB))
    written = json.dumps(found.to_dict())
    assert Rehearsal.model_validate_json(written) == found.rehearsal
    said = json.loads(written)["found"]
    assert (said["verdict"], said["fullest_stage"], said["step_seconds"]) == ("does_not_fit", 1, 0.5)
    assert said["on_gpu_bytes"] == said["most_bytes"] == {"0": GIB, "1": 41 * GIB}


def test_the_document_has_every_key_of_the_file():
    page = (ROOT / "docs" / "how-it-works" / "rehearsal.md").read_text(encoding="utf-8")
    records = [
        Rehearsal,
        RehearsalRequest,
        KindReport,
        PeakHolder,
        MemoryOverTime,
        CollectiveCount,
        LinkCount,
        ModuleWork,
        TimedBlock,
    ]
    keys = {name for record in records for name in record.model_fields} | set(
        rehearsed(kind(0, GIB)).to_dict()["found"]
    )
    assert sorted(key for key in keys if f"`{key}`" not in page) == []


def test_a_request_that_is_none_is_refused(tmp_path):
    (tmp_path / "request.json").write_text('{"hosts": 1}')
    with pytest.raises(
        ConfigError, match=r"request.json is no request of a rehearsal: Field required at ranks_per_host"
    ):
        read_request(tmp_path / "request.json")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"script": "nowhere.py"}, "nowhere.py is not a file"),
        ({"rehearsed_steps": 1}, "rehearsed_steps is 1; the first step makes what stays"),
        ({"steps": 0}, "steps is 0; it is the number of steps of the whole training"),
        ({"instance_type": "ml.unknown.4xlarge"}, "give processes_per_host"),
        ({"parameters": {"pipeline_parallel_degree": 3}}, "cannot be divided into replicas of 3"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(given, said):
    with pytest.raises(ConfigError, match=said):
        rehearse(**{"script": SCRIPT, **given})


#: Two stages as they are asked for: to the command, or by the script, after which the processes are started again.
ASKED = {
    "said": ["--parameters", json.dumps({"ddp": True, "pipeline_parallel_degree": 2}), "--", "--layers", "2"],
    "by the script": ["--", "--layers", "2", "--wrong", "degree"],
}


@pytest.mark.job
@pytest.mark.timeout(120)
@pytest.mark.parametrize("asked", ["said", pytest.param("by the script", marks=pytest.mark.full)])
def test_a_rehearsal_of_1024_ranks_writes_its_figures(asked, tmp_path):
    file = tmp_path / "found.json"
    done = CliRunner().invoke(main, ["rehearse", str(SCRIPT), "--count", "128", "--json", str(file), *ASKED[asked]])
    assert done.exit_code == 0, done.output
    assert "fits" in done.output
    assert "1024 ranks: 2 kinds of ranks" in done.output
    found = json.loads(file.read_text())
    assert [one["stands_for"] for one in found["kinds"]] == [512, 512]
    assert {row["ranks"] for row in found["kinds"][0]["collectives"] if row["group"] == "dp"} == {512}
    assert found["kinds"][0]["links"]
    # Buckets of gradients are buffers, though torch.empty is called through the emulation.
    assert set(found["kinds"][0]["classes"]) >= {"parameter", "optimizer state", "activation", "buffer"}


def test_libraries_find_the_variables_of_a_job():
    environment = _environment({"ddp": True, "pipeline_parallel_degree": 2}, {"MINE": "1"})
    assert json.loads(environment["SM_HP_MP_PARAMETERS"]) == {
        "ddp": True,
        "partitions": 2,
        "pipeline_parallel_degree": 2,
    }
    assert json.loads(environment["SM_FRAMEWORK_PARAMS"]) == {"sagemaker_mpi_enabled": True}
    assert environment["MINE"] == "1"


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(300)
def test_a_script_of_transformers_trainer_is_rehearsed_as_it_is(tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "corpus.txt").write_text("a line of text\n" * 4000)
    words = ["--output_dir", str(tmp_path / "state"), "--max_steps", "8", "--per_device_train_batch_size", "4"]
    found = rehearse(
        ROOT / "entrypoints" / "train_trainer.py",
        [*words, "--save_strategy", "no", "--report_to", "none"],
        instance_count=2,
        parameters={"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2},
        channels={"train": tmp_path},
    )
    assert [one.stands_for for one in found.rehearsal.kinds] == [8, 8]
    assert found.rehearsal.kinds[0].step_samples == 4 * 8
    assert all(one.parameters for one in found.rehearsal.kinds)


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(120)
def test_pytorch_s_own_data_parallelism_is_refused_with_its_line():
    with pytest.raises(RehearsalFailed, match=r"train_ddp.py:\d+: SMPUserError: DistributedDataParallel of PyTorch"):
        rehearse(ROOT / "entrypoints" / "train_ddp.py", parameters={"ddp": True})


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("batch", r"gpt_script.py:\d+: .*7"),
        ("values", r"gpt_script.py:\d+: .*nonzero at"),
    ],
)
def test_what_would_fail_on_the_cluster_fails_here_with_the_script_s_line(wrong, said):
    with pytest.raises(RehearsalFailed, match=said) as caught:
        rehearse(SCRIPT, ["--hidden", "256", "--wrong", wrong], parameters={"microbatches": 2, "ddp": True})
    assert "Traceback" not in str(caught.value)


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(120)
def test_a_stage_that_does_not_fit_is_found():
    found = rehearse(
        SCRIPT,
        ["--layers", "8", "--hidden", "512"],
        parameters={"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2},
        gpu_memory_bytes=100 * 2**20,
    )
    assert found.verdict is Verdict.DOES_NOT_FIT


def test_channels_are_folders_that_are_there(tmp_path):
    with pytest.raises(ConfigError, match="the data of channel 'train' is missing"):
        rehearse(SCRIPT, channels={"train": tmp_path / "nowhere"})
