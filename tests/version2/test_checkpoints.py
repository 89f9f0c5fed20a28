"""Checkpoints of version 2: sharded, in the background, local; at another degree; rotation; S3; failures."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.documents.doc_runs import matching
from support.training import version2_checkpoints as training

from smp_records.records import parse_failure
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_version2.checkpoint import rotation
from smp_version2.checkpoint.rotation import SORT_BY_LAST_INT, limit_num_subdirs

SHARD = {"hybrid_shard_degree": 2}


@pytest.mark.parametrize(("way", "world"), [("now", 2), ("async", 4), ("local", 2), ("local", 4), ("PyTorch", 4)])
def test_a_resumed_training_equals_one_without_a_break(ranks: Any, tmp_path: Path, way: str, world: int) -> None:
    for found in ranks(training.resume, world, SHARD, way, tmp_path / "llama-3steps", init=False):
        assert found["differing"] == []
        assert found["at"] == training.SAVED
        assert any("exp_avg" in name for name in found["names"])
        assert "1.passes" in found["names"]
    files = sorted(path.name for path in (tmp_path / "llama-3steps").rglob("*.distcp"))
    assert len(files) == (2 if way != "local" else world), files  # those of the first save are gone


@pytest.mark.parametrize("way", ["full_optim_state_dict", "optim_state_dict", "PyTorch's state_dict"])
def test_whole_optimizer_state_has_each_moment(ranks: Any, way: str) -> None:
    """PyTorch gathers all kinds of moments into the same memory, and copies none that is on the CPU already."""
    assert ranks(training.gather_moments, 2, SHARD, way, init=False) == [[], []]


@pytest.mark.parametrize("joins", [False, True])
def test_sharded_state_without_shards_is_whole(ranks: Any, joins: bool) -> None:
    """One of the copies saves: parts of moments on others would be missing."""
    assert ranks(training.list_parts_of_moments, 2, joins, init=False) == [{"Tensor"}] * 2


@pytest.mark.parametrize("way", ["now", "async", "PyTorch"])
def test_one_of_the_copies_saves_while_the_others_go_on(ranks: Any, tmp_path: Path, way: str) -> None:
    """Public scripts let one copy save and name the group of the model; without sharding that has all ranks, which do not call."""
    for found in ranks(training.resume, 2, {"hybrid_shard_degree": 1}, way, tmp_path / "llama", init=False):
        assert found["differing"] == []
        assert found["at"] == training.SAVED
    assert len(list((tmp_path / "llama").glob("*.distcp"))) == 1


def test_copies_that_all_save_wait_for_the_one_that_writes(ranks: Any, tmp_path: Path) -> None:
    found = ranks(training.save_copies, 2, tmp_path, init=False)
    assert [each["found"] for each in found] == [0.0, 0.0]
    assert [each["ended"] for each in found] == [1, 1]
    assert found[0]["keys"] == ""
    assert all(words in found[1]["keys"] for words in ("rank 0", "rank 1 saves other keys", "leave process_group out"))
    assert all("no space is left" in each["failed"] for each in found)
    assert "rank 0" in found[1]["failed"]


@pytest.mark.parametrize("way", ["now", "local"])
def test_a_training_that_shards_by_itself_saves_every_shard(ranks: Any, tmp_path: Path, way: str) -> None:
    """Without a degree PyTorch shards over all ranks, and no rank holds a copy of another one's shard."""
    for found in ranks(training.resume, 2, {}, way, tmp_path, init=False):
        assert found["differing"] == []
        assert found["at"] == training.SAVED


def test_ranks_with_the_same_shard_are_those_of_the_scripts_strategy(ranks: Any) -> None:
    wanted = {
        "FULL_SHARD": ([0, 0, 0, 0], [[0], [1], [2], [3]]),
        "HYBRID_SHARD": ([0, 0, 1, 1], [[0, 2], [1, 3]]),
        "NO_SHARD": ([0, 1, 2, 3], [[0, 1, 2, 3]]),
    }
    assert ranks(lambda: {name: training.find_copies(name) for name in wanted}, 4, init=False) == [wanted] * 4


def test_sharded_state_loads_at_another_degree(ranks: Any, tmp_path: Path) -> None:
    wanted = ranks(training.save_whole, 2, SHARD, "now", tmp_path, init=False)[0]
    for found in ranks(training.load_whole, 4, {"hybrid_shard_degree": 4}, "now", tmp_path, init=False):
        assert isinstance(found, dict), found
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_local_state_of_another_degree_is_refused_by_name(ranks: Any, tmp_path: Path) -> None:
    ranks(training.save_whole, 2, SHARD, "local", tmp_path, init=False)
    found = ranks(training.load_whole, 4, {"hybrid_shard_degree": 4}, "local", tmp_path, init=False)
    for rank, (code, message) in enumerate(found):
        assert code == "SMP401"
        wanted = [f"shard {rank} of 2", f"shard {rank} of 4"] if rank < 2 else [f"fsdp{rank}", ".metadata"]
        assert all(words in message for words in wanted), message


def _resume_from_fsdp(folder: Path, saves: bool) -> list[Any]:
    """Train, save FSDP's own local state dicts in the middle as scripts do, and go on; or load them and go on.

    Returns:
        the weights at the end.
    """
    import torch.sagemaker as tsm
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    tsm.init(SHARD)
    torch.manual_seed(0 if saves else 1)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    layers[2] = FullyShardedDataParallel(tsm.transform(layers[2]), use_orig_params=True)
    model: Any = offload_wrapper(FullyShardedDataParallel(tsm.transform(layers), use_orig_params=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    file = folder / f"{tsm.state.rank}.pt"
    try:
        if not saves:
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                state = torch.load(file, weights_only=False)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
        for step in range(4):
            if step == 2 and saves:
                with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            if step >= 2 or saves:
                rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(model):
            return [parameter.tolist() for parameter in model.parameters()]
    finally:
        tsm.shutdown()


def test_local_state_of_fsdp_itself_is_loaded(ranks: Any, tmp_path: Path) -> None:
    """PyTorch alone refuses the keys that it has written, with use_orig_params."""
    wanted = ranks(_resume_from_fsdp, 2, tmp_path, True, init=False)
    assert ranks(_resume_from_fsdp, 2, tmp_path, False, init=False) == wanted


@pytest.mark.parametrize("way", ["now", "background"])
def test_local_state_that_no_job_could_load_is_refused_at_the_save(ranks: Any, tmp_path: Path, way: str) -> None:
    """Without sharding FSDP numbers the copies, so that scripts name a folder for each, and only one would get metadata."""
    found = ranks(training.save_local_copies, 2, way, tmp_path, init=False)
    for code, message in found:
        assert code == "SMP401"
        assert all(f"rank {rank} to {tmp_path}/tp0_ep0_fsdp{rank}" in message for rank in range(2)), message
    assert list(tmp_path.rglob(".metadata")) == []


def test_a_save_that_fails_is_raised_on_all_ranks_and_leaves_the_one_before(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(training.fail_in_background, 2, tmp_path, init=False):
        ((code, message),) = found["raised"]
        assert code == "SMP401"
        assert "rank 1" in message
        assert "no space" in message
        assert found["found"] == ([0.0] * 4, 1)
        assert "z" in found["missing"]
        assert found["again"] == 3
        number, finalized = found["numbers"]
        assert finalized == [number]
    assert len(list(tmp_path.glob("*.distcp"))) <= 2  # files of the save that failed are gone


def test_a_save_that_fails_while_the_process_ends_fails_the_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import smp_launch, torch_sagemaker_finder, torch.sagemaker as tsm\n"
        "from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save\n"
        "tsm.init({})\n"
        f"async_save({{'x': 1}}, checkpoint_id={str(script / 'no-folder')!r})\n"
    )
    container = Path(__file__).parents[2] / "container"
    environment = {**os.environ, "PYTHONPATH": str(container)}
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1, ended.stderr
    (record,) = filter(None, map(parse_failure, ended.stderr.splitlines()))
    assert record.code == "SMP401"
    assert "no-folder" in record.message


def test_the_page_runs(ranks: Any, tmp_path: Path) -> None:
    (block,) = matching(("version-2.md", "async_save("), "python")
    assert ranks(training.run_page, 2, block.code, tmp_path, init=False) == [7, 7]


def make_checkpoints(root: Path, *steps: int, inside: str = "") -> None:
    for step in steps:
        folder = root / f"llama-{step}steps" / inside
        folder.mkdir(parents=True)
        for name in ("__0_0.distcp", ".metadata"):
            (folder / name).touch()


def names_in(root: Path) -> list[str]:
    rotation.wait_for_removals()
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("inside", ["", "tp2-0"])
def test_rotation_keeps_the_newest(tmp_path: Path, inside: str) -> None:
    make_checkpoints(tmp_path, 8, 9, 10, inside=inside)
    (tmp_path / "logs-3").mkdir()
    (tmp_path / "11steps").write_text("a file")
    path, regex = tmp_path / "llama-10steps" / inside, r"^.*\d+steps$"
    everything = names_in(tmp_path)
    limit_num_subdirs(path, 2, sort_fn=SORT_BY_LAST_INT, regex=regex, log=False)
    assert names_in(tmp_path) == everything
    limit_num_subdirs(path, 2, sort_fn=SORT_BY_LAST_INT, regex=regex)
    assert names_in(tmp_path) == ["11steps", "llama-10steps", "llama-9steps", "logs-3"]
    limit_num_subdirs(tmp_path / "llama-12steps", 1, regex=regex)  # before it is written
    assert names_in(tmp_path) == ["11steps", "llama-10steps", "logs-3"]


def test_rotation_keeps_the_newest_complete_one(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, 1, 2, 3)
    (tmp_path / "llama-3steps" / ".metadata").unlink()  # its save was cut off
    (tmp_path / "logs").mkdir()
    limit_num_subdirs(tmp_path, 1)
    assert names_in(tmp_path) == ["llama-2steps", "llama-3steps", "logs"]
    with pytest.raises(SMPUserError, match="at least 1"):
        limit_num_subdirs(tmp_path, 0)
    with pytest.raises(SMPUserError, match="lifecycle"):
        limit_num_subdirs("s3://bucket/x", 1)


def test_rotation_hides_old_checkpoints_at_once_and_removes_what_a_killed_job_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoints(tmp_path, 1, 2, 3)
    for left in (".llama-0steps.removed", ".other.removed"):
        (tmp_path / left).mkdir()
    may_remove = threading.Event()

    def remove(folders: Any) -> list[str]:
        assert may_remove.wait(30)
        return original(folders)

    original = rotation.remove
    monkeypatch.setattr(rotation, "remove", remove)
    limit_num_subdirs(tmp_path, 1)
    hidden = [f".llama-{number}steps.removed" for number in (0, 1, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*hidden, ".other.removed", "llama-3steps"]
    may_remove.set()
    assert names_in(tmp_path) == [".other.removed", "llama-3steps"]


def write_half(files: Any, path: str) -> None:
    with files.create_stream(path, "wb") as stream:
        stream.write(b"half")
        raise OSError("the writer stops")


def test_a_checkpoint_in_s3(solo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with moto.mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        with training.joined({}):
            from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader
            from torch.sagemaker.distributed.checkpoint.s3_filesystem import S3FileSystem
            from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
            from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, save

            values, folder = torch.arange(1000.0), "s3://bucket/run/5steps"
            async_save({"x": values, "y": "text"}, checkpoint_id=folder, s3_region="us-east-1")
            save({"x": values + 1, "y": "newer"}, checkpoint_id=f"{folder}-b", s3_region="us-east-1")
            found = {"x": torch.zeros(1000), "y": ""}
            with pytest.raises(CheckpointError, match="no complete"):
                load(found, checkpoint_id="s3://bucket/run/6steps", s3_region="us-east-1")
            from torch.sagemaker.distributed.checkpoint.state_dict_saver import maybe_finalize_async_calls

            assert len(maybe_finalize_async_calls()) == 1
            load(found, storage_reader=DistributedFileSystemReader(Path(folder), s3_region="us-east-1"))
            assert torch.equal(found["x"], values)
            assert found["y"] == "text"
            files = S3FileSystem("us-east-1")
            assert sorted(files.fs.listdir("s3://bucket/run")) == ["bucket/run/5steps", "bucket/run/5steps-b"]
            assert files.exists(f"{folder}/.metadata")
            with pytest.raises(OSError, match="stops"):
                write_half(files, f"{folder}/half")
            assert not files.exists(f"{folder}/half")


@pytest.mark.parametrize("in_background", [False, True])
def test_a_flipped_bit_is_found_in_every_region_of_every_file(solo: Any, tmp_path: Path, in_background: bool) -> None:
    from click.testing import CliRunner

    from smp_estimator.cli.main import main
    from smp_version2.checkpoint.state_dict_loader import load
    from smp_version2.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls, save

    values = {"x": torch.arange(1000.0), "z": torch.ones(7), "y": "text"}
    with training.joined({}):
        save({"x": torch.zeros(1000), "z": torch.zeros(7), "y": ""}, checkpoint_id=tmp_path)
        if in_background:
            async_save(values, checkpoint_id=tmp_path)
            maybe_finalize_async_calls()
        else:
            save(values, checkpoint_id=tmp_path)
        files = sorted(tmp_path.iterdir())
        assert len(files) == 3  # those of the first save are gone
        for file in files:
            own = file.read_bytes()
            for place in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
                flipped = bytearray(own)
                flipped[int(place * (len(own) - 1))] ^= 4
                file.write_bytes(flipped)
                done = CliRunner().invoke(main, ["checkpoint", "verify", str(tmp_path)])
                assert (done.exit_code, file.name in done.output) == (1, True), (file.name, place)
                found = {"x": torch.zeros(1000), "z": torch.zeros(7), "y": ""}
                with pytest.raises((CheckpointError, SMPUserError)):
                    load(found, checkpoint_id=tmp_path)
                assert not found["x"].any()
            file.write_bytes(own)
        for file in tmp_path.glob("checksums_*.json"):  # as older releases have saved it
            file.unlink()
        found = {"x": torch.zeros(1000), "z": torch.zeros(7), "y": ""}
        load(found, checkpoint_id=tmp_path)
        assert torch.equal(found["x"], values["x"])


def test_what_is_asked_wrongly_is_named(solo: Any, tmp_path: Path) -> None:
    from smp_version2.checkpoint.state_dict_loader import load
    from smp_version2.checkpoint.state_dict_saver import async_save, save
    from smp_version2.checkpoint.state_dict_utils import sm_state_dict_type

    with training.joined({}):
        calls = [
            (lambda: save([]), "list"),
            (lambda: save({}), "checkpoint_id"),
            (lambda: load({}), "checkpoint_id"),
            (lambda: async_save({}, checkpoint_id=tmp_path, sharded_strategy=int), "sharded_strategy"),
            (lambda: save({}, checkpoint_id="gs://bucket/x"), "s3://"),
            (lambda: sm_state_dict_type(torch.nn.Linear(1, 1), "local").__enter__(), "SM_LOCAL_STATE_DICT"),
        ]
        for call, words in calls:
            with pytest.raises(SMPUserError, match=words) as raised:
                call()
            assert raised.value.code == "SMP402"


def test_without_boto3_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from smp_config.errors import PackageMissing
    from smp_version2.checkpoint.filesystem import path_to_file_system

    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(PackageMissing, match="pip install boto3"):
        path_to_file_system("s3://bucket/x")


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
        functools.partial(torch.optim.Adam, lr=torch.tensor(0.1), weight_decay=0.1),
    ],
    ids=["SGD", "Adam"],
)
def test_state_for_loading_is_that_before_the_first_update(make: Any) -> None:
    """What a checkpoint lacks begins with it: a decay must not be in the moments."""
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import init_optim_state

    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = make([parameter])
    settings = dict(optimizer.param_groups[0])
    init_optim_state(optimizer)
    assert optimizer.param_groups[0] == settings
    assert parameter.tolist() == [1, 1, 1]
    assert all(not value.any() for value in optimizer.state[parameter].values())
