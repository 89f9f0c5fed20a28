"""AWS's GPT-2 sample: its calls train, evaluate, save, resume and leave a whole model, with equal losses however it is spread."""

from __future__ import annotations

import json
import tarfile

import pytest
import torch
from support.platform.jobs import model_parallel
from support.scripts import gpt2_script

pytestmark = pytest.mark.timeout(400)

WIDTH, VOCABULARY = 16, 48
#: Processes, hyperparameters by the notebook's names, and what the notebook's distribution adds.
STRATEGIES = {
    "one process": (1, {}, {}),
    "pp 2": (2, {"pipeline_parallel_degree": 2}, {}),
    "pp 2 by hand": (2, {"pipeline_parallel_degree": 2, "manual_partition": 1}, {}),
    "tp 2": (2, {"tensor_parallel_degree": 2, "prescaled_batch": 1}, {}),
    "pp 2 × tp 2": (
        4,
        {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "prescaled_batch": 1, "shard_optimizer_state": 1},
        {},
    ),
    "sdp 2": (
        2,
        {"sharded_data_parallel_degree": 2, "bf16": 1, "train_batch_size": 2},
        {"sdp_param_persistence_threshold": 100, "sdp_gradient_clipping": 1e6},
    ),
}
DEFAULT = ("pp 2", "sdp 2")


def _marked(way, *names, full=True):
    """A case per strategy, for the table of clients; all but some only in the whole matrix."""
    cases = []
    for name in names:
        feature = f"train, save, resume, whole model{way}" + (", manual partition" if "hand" in name else "")
        marks = [pytest.mark.client("GPT-2 sample", feature, name.removesuffix(" by hand"))]
        cases.append(pytest.param(name, marks=marks + [pytest.mark.full] * (full or name not in DEFAULT)))
    return cases


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folders of a training and a test channel: lines of token ids that count up in steps of 1, 2 or 3."""
    folder = tmp_path_factory.mktemp("data")
    numbers = torch.Generator().manual_seed(0)
    for channel, lines in (("train", 32), ("test", 16)):
        (folder / channel).mkdir()
        with (folder / channel / f"{channel}_0.json").open("w") as file:
            for start, stride in torch.randint(0, 48, (lines, 2), generator=numbers).tolist():
                ids = [(start + (1 + stride % 3) * index) % VOCABULARY for index in range(WIDTH)]
                file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * WIDTH}) + "\n")
    return folder


@pytest.fixture(scope="module")
def expected():
    """What one process found, once it was asked."""
    return {}


def _words(**hyperparameters):
    return [word for name, value in hyperparameters.items() for word in (f"--{name}", str(value))]


def _in_rank(words):
    from smp_emulation.installing import emulated

    with emulated():
        return gpt2_script.main(words)


def _in_ranks(ranks, data, tmp_path, size, parameters, **hyperparameters):
    (tmp_path / "model").mkdir(exist_ok=True)
    folders = {
        "training-dir": data / "train",
        "test-dir": data / "test",
        "checkpoint-dir": tmp_path / "checkpoints",
        "model-dir": tmp_path / "model",
    }
    return ranks(
        _in_rank,
        size,
        _words(**folders, **hyperparameters),
        init=False,
        env={
            "SM_HP_MP_PARAMETERS": json.dumps({"ddp": True, "microbatches": 2, **parameters}),
            "LOCAL_WORLD_SIZE": str(size),
            "SMP_CHECKPOINT_LAYOUT": "flat_groups",  # the sample's own tool reads them
        },
        timeout=150,
    )


def _in_job(data, tmp_path, size, parameters, **hyperparameters):
    from smp_estimator import SMPEstimator

    partitions = hyperparameters.get("pipeline_parallel_degree", 1)
    estimator = SMPEstimator(
        entry_point="gpt2_script.py",
        source_dir=str(gpt2_script.__file__).rpartition("/")[0],
        instance_type="local",
        instance_count=1,
        output_path=f"file://{tmp_path / 'out'}",
        hyperparameters={"checkpoint-dir": str(tmp_path / "checkpoints"), **hyperparameters},
        distribution=model_parallel(
            size,
            ddp=True,
            microbatches=2,
            partitions=partitions,
            tensor_parallel_degree=hyperparameters.get("tensor_parallel_degree", 1),
            shard_optimizer_state=hyperparameters.get("shard_optimizer_state", 0) > 0,
            prescaled_batch=hyperparameters.get("prescaled_batch", 0) > 0,
            optimize="speed",
            auto_partition=not hyperparameters.get("manual_partition", 0),
            default_partition=0,
            **parameters,
        ),
        environment={"SMP_CHECKPOINT_LAYOUT": "flat_groups"},  # the sample's own tool reads them
        debugger_hook_config=False,
        disable_profiler=True,
    )
    estimator.fit({name: f"file://{data / name}" for name in ("train", "test")}, logs=False)
    with tarfile.open(estimator.model_data.removeprefix("file://")) as archive:
        archive.extractall(tmp_path / "model", filter="data")
    return [json.loads((tmp_path / "model" / f"found_{rank}.json").read_text()) for rank in range(size)]


def _losses(found):
    """Of each step, the mean over ranks: each has the loss of its own samples."""
    return {int(step): sum(one["losses"][step] for one in found) / len(found) for step in found[0]["losses"]}


def _check(run, name, expected, folder, data):
    """Three steps, three more that are resumed, and the whole model in plain Transformers: as one process without a stop."""
    size, settings, parameters = STRATEGIES[name]
    tolerance = 2e-2 if "bf16" in settings else 1e-4
    if not expected:
        found = run(1, {}, max_steps=6)
        expected.update(losses=_losses(found), validation=found[0]["validation"])
        assert expected["losses"][6] < expected["losses"][1]
    first = run(size, parameters, **settings, max_steps=3)
    rest = run(size, parameters, **settings, max_steps=6, load_partial=1, save_final_full_model=1)
    losses = {**_losses(first), **_losses(rest)}
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert losses == pytest.approx(expected["losses"], abs=tolerance)
    assert rest[0]["validation"] == pytest.approx(expected["validation"], abs=tolerance)
    assert _loss_of(_whole(folder), data) == pytest.approx(rest[0]["validation"], abs=tolerance)


def _whole(folder):
    """The weights of the final model, by Transformers' names."""
    from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2

    if (folder / "fullmodel.pt").exists():
        return torch.load(folder / "fullmodel.pt")
    (partial,) = (path for path in folder.iterdir() if path.is_dir())
    # As the sample's sharded_data_parallel_checkpoint.py does, which asks for whatever a file holds.
    content = torch.load(partial / "user_content.pt", weights_only=False)
    shards = [torch.load(path) for path in sorted(partial.glob("optimizer_*.pt"))]
    buffers = torch.load(partial / "model_0.pt")["module"]
    assert shards[0]["partition_count"] == len(shards)
    flat, state, start = [shard["fp32_flat_groups"] for shard in shards], {}, 0
    for name, shape in ((name, shape) for group in content["param_shapes"] for name, shape in group.items()):
        length = -(-shape.numel() // len(shards))
        pieces = [torch.cat(list(groups)).narrow(0, start, length) for groups in flat]
        state[name.removeprefix("module.")] = torch.cat(pieces).narrow(0, 0, shape.numel()).view(shape)
        start += length
    assert start == sum(len(group) for group in flat[0])
    state.update((name, buffers[name]) for name in content["buffer_names"])
    return translate_state_dict_to_hf_gpt2(state, max_seq_len=WIDTH)


@torch.no_grad()
def _loss_of(state, data):
    """The validation loss of weights in a plain model, of the samples that the script has taken."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=WIDTH, n_embd=32, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=1
    )
    model = GPT2LMHeadModel(config).eval()
    absent = model.load_state_dict(state, strict=False)
    assert not [name for name in absent.missing_keys if name != "lm_head.weight"]
    assert not absent.unexpected_keys
    lines = gpt2_script.Lines(data / "test")
    sampler = torch.utils.data.DistributedSampler(lines, shuffle=True, seed=12345, rank=0, num_replicas=1)
    ids = torch.stack([lines[index][0] for index in list(sampler)[:8]])
    return float(model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("name", _marked("", *STRATEGIES, full=False))
def test_its_calls_train_as_one_process(ranks, data, expected, tmp_path, name):
    def run(size, parameters, **hyperparameters):
        return _in_ranks(ranks, data, tmp_path, size, parameters, **hyperparameters)

    _check(run, name, expected, tmp_path / "model", data)


@pytest.mark.job
@pytest.mark.parametrize("name", _marked(", through fit()", *STRATEGIES))
def test_its_jobs_train_as_one_process(data, expected, tmp_path, name):
    def run(size, parameters, **hyperparameters):
        return _in_job(data, tmp_path, size, parameters, **hyperparameters)

    _check(run, name, expected, tmp_path / "model", data)


@pytest.mark.client("GPT-2 sample", "fp16 with the sample's loss scaling", "tp 2")
def test_half_precision_trains_from_the_third_step_on(ranks, data, tmp_path):
    settings = {"tensor_parallel_degree": 2, "prescaled_batch": 1, "fp16": 1, "max_steps": 6, "checkpoint_freq": 6}
    found = _in_ranks(ranks, data, tmp_path, 2, {"fp16": True}, **settings)
    assert found[0]["losses"][6] < found[0]["losses"][1] - 0.05
