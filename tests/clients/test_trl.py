"""SFT and DPO of TRL, with and without LoRA: losses and metrics of one process, and models that load anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.models.huggingface import tiny_config

pytestmark = pytest.mark.timeout(300)

STEPS, BATCH = 4, 4
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(45))]
SHARDS = {"sdp_param_persistence_threshold": 100, "sdp_gradient_clipping": 1e6}
STRATEGIES = {
    "one process": (1, None),
    "pp 2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "tp 2": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    "sdp 2": (2, {"sharded_data_parallel_degree": 2, **SHARDS}),
    "dp 2": (2, {}),
    "cp 2": (2, {"context_parallel_degree": 2}),
    "pp 2 × dp 2": (4, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "pp 2 × tp 2": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "prescaled_batch": True}),
    "pp 2 × sdp 2": (4, {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2, **SHARDS}),
}

#: The script knows words of letters only.
LETTERS = str.maketrans("0123456789", "abcdefghij")
SAMPLE = {
    ("SFT", "llama", False, "pp 2"),
    ("SFT", "gpt2", True, "tp 2"),
    ("SFT", "gpt2", True, "sdp 2"),
    ("DPO", "gpt2", False, "pp 2"),
    ("DPO", "llama", True, "sdp 2"),
}


def _environment(config):
    parameters = {"partitions": config.get("pipeline_parallel_degree", 1), "ddp": True, **config}
    return {
        "SM_HP_MP_PARAMETERS": json.dumps(parameters),
        "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True}),
        "ACCELERATE_USE_CPU": "true",
    }


@pytest.fixture(scope="module")
def jobs():
    """``jobs(strategy, function, *args)``: what a rank of a job returns, or one process without this library."""
    from support.ranks.rank_pool import RankPool

    pools = {}

    def run(strategy, function, *args):
        size, config = STRATEGIES[strategy]
        is_job = config is not None
        pool = pools.get(is_job) or pools.setdefault(is_job, RankPool(4 if is_job else 1))
        try:
            return pool.run(
                function, size, *args, init=is_job, env=_environment(config or {}) if is_job else None, timeout=200.0
            )
        except BaseException:  # processes keep the groups that Accelerate has made, and answers that nobody waits for
            pools.pop(is_job).close()
            raise

    yield run
    for pool in pools.values():
        pool.close()


def _tokenizer():
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _model(family, seed=0, attention=None):
    import transformers as hf

    torch.manual_seed(seed)
    config = tiny_config(family, len(WORDS))
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 1, 1
    return hf.AutoModelForCausalLM.from_config(config, **({"attn_implementation": attention} if attention else {}))


def _lora():
    from peft import LoraConfig

    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    return LoraConfig(**settings)


def _texts(count, seed, length):
    from random import Random

    random = Random(seed)
    return [" ".join(random.choice(WORDS[3:]) for _ in range(random.randint(4, length))) for _ in range(count)]


def _pairs(count, seed):
    return {name: _texts(count, seed + number, 5) for number, name in enumerate(("prompt", "chosen", "rejected"))}


PAIRS = {"train": _pairs(16, 10), "test": _pairs(8, 20)}


def _settings(kind, folder, **more):
    import inspect

    import smp_runtime.job.session as sessions

    size = 1
    if sessions.is_initialized():
        import smdistributed.modelparallel.torch as smp

        size = smp.rdp_size() if smp.state.cfg.prescaled_batch else smp.dp_size()
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH // size, "per_device_eval_batch_size": BATCH // size,
        "max_steps": STEPS, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "seed": 3, "max_length": 14, "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "average_tokens_across_devices": True, "gradient_checkpointing": False, "dataloader_drop_last": True,
    }  # fmt: skip
    known = inspect.signature(kind.__init__).parameters
    return kind(**{name: value for name, value in (settings | more).items() if name in known})


def _logs(trainer):
    return [{k: v for k, v in entry.items() if isinstance(v, float | int)} for entry in trainer.state.log_history]


def _sft(family, adapted, folder, more):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    more = dict(more)
    resume, attention = more.pop("resume", None), more.pop("attention", None)
    torch.manual_seed(1)
    data = Dataset.from_dict({"text": _texts(16, 1, 12)})
    trainer = SFTTrainer(
        model=_model(family, attention=attention),
        args=_settings(SFTConfig, folder, **{"packing": False, **more}),
        train_dataset=data,
        eval_dataset=Dataset.from_dict({"text": _texts(8, 2, 12)}),
        processing_class=_tokenizer(),
        peft_config=_lora() if adapted else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()
    trainer.save_model(f"{folder}/final")
    return _logs(trainer), evaluated


def _dpo(family, adapted, folder, more):
    from datasets import Dataset, load_dataset
    from trl import DPOConfig, DPOTrainer

    torch.manual_seed(1)

    def pairs(name):
        if more.get("precompute_ref_log_probs"):  # rank 0 writes it into the data set's cache, where the others read it
            return load_dataset(
                "json", data_files=str(folder.parent / f"{name}.json"), cache_dir=f"{folder}/cache", split="train"
            )
        return Dataset.from_dict(PAIRS[name])

    trainer = DPOTrainer(
        model=_model(family),
        ref_model=None if adapted else _model(family, seed=4),
        args=_settings(DPOConfig, folder, beta=0.5, **more),
        train_dataset=pairs("train"),
        eval_dataset=pairs("test"),
        processing_class=_tokenizer(),
        peft_config=_lora() if adapted else None,
    )
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model(f"{folder}/final")
    return _logs(trainer), evaluated


_NOT_COMPARED = ("runtime", "per_second", "flos", "grad_norm", "epoch", "memory")


#: Means over tokens, which are averaged over microbatches as over accumulated batches.
_OF_MICROBATCHES = ("entropy", "mean_token_accuracy", "logits")


def _same(found, expected, strategy):
    assert found.keys() == expected.keys()
    several = (STRATEGIES[strategy][1] or {}).get("microbatches", 1) > 1
    left_out = _NOT_COMPARED + (_OF_MICROBATCHES if several else ())
    if abs(expected.get("rewards/margins", 1)) < 1e-5:  # neither is preferred yet, but by a rounding error
        left_out += ("rewards/accuracies",)
    for name, value in expected.items():
        if not any(part in name for part in left_out):
            assert found[name] == pytest.approx(value, abs=2e-5), name


def _check(jobs, tmp_path, strategy, run, family, adapted, **more):
    ((expected, evaluated),) = jobs("one process", run, family, adapted, tmp_path / "alone", more)
    results = jobs(strategy, run, family, adapted, tmp_path / "job", more)
    logs, metrics = results[0]
    assert len(logs) == len(expected)
    for mine, theirs in zip(logs, expected, strict=True):
        _same(mine, theirs, strategy)
    _same(metrics, evaluated, strategy)
    _same_model(tmp_path, family, adapted)


@pytest.mark.full
@pytest.mark.client("TRL", "SFT with LoRA, gradient checkpointing", "pp 2")
def test_sft_with_gradient_checkpointing(jobs, tmp_path):
    _check(jobs, tmp_path, "pp 2", _sft, "llama", adapted=True, gradient_checkpointing=True)


@pytest.mark.full
@pytest.mark.client("TRL", "DPO with LoRA, gradient checkpointing", "pp 2")
def test_dpo_with_gradient_checkpointing(jobs, tmp_path):
    _check(jobs, tmp_path, "pp 2", _dpo, "llama", adapted=True, gradient_checkpointing=True)


#: Documents in one row: by name what SFTConfig is told, and the attention.
PACKED = {
    "packed": ({"packing": True, "max_length": 24}, "sdpa"),
    "packed, eager": ({"packing": True, "max_length": 24}, "eager"),
    "wrapped": ({"packing": True, "packing_strategy": "wrapped", "max_length": 24}, "sdpa"),
    "padding-free": ({"padding_free": True, "max_length": None}, "sdpa"),
}


@pytest.mark.full
@pytest.mark.client("TRL", "SFT with packing", "cp 2")
@pytest.mark.parametrize("name", PACKED)
def test_sft_of_packed_documents(jobs, tmp_path, name):
    more, attention = PACKED[name]
    _check(jobs, tmp_path, "cp 2", _sft, "llama", adapted=False, attention=attention, **more)


def _entry_point(folder, data):
    """``entrypoints/train_lora.py`` as a script, on rows of packed samples; its losses, and what it saves."""
    import runpy
    import sys
    from unittest import mock

    script = Path(__file__).resolve().parents[2] / "entrypoints" / "train_lora.py"
    words = ["--sm-channel-train", str(data), "--sm-model-dir", str(folder), "--steps", "3", "--batch", "2"]
    words += ["--rank", "0", "--packed", "40"]
    with mock.patch.object(sys, "argv", [str(script), *words]):
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.full
@pytest.mark.client("TRL", "SFT with packing, a script", "cp 2")
def test_the_entry_point_with_packed_samples(jobs, tmp_path):
    from safetensors.torch import load_file

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_text(" ".join(_texts(120, 9, 12)).replace("w", "word").translate(LETTERS))
    for strategy in ("one process", "cp 2"):
        jobs(strategy, _entry_point, tmp_path / strategy, tmp_path / "data")
    found, expected = (tmp_path / strategy for strategy in ("cp 2", "one process"))
    losses = [json.loads((folder / "metrics.json").read_text())["losses"] for folder in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    weights = [load_file(folder / "model.safetensors") for folder in (found, expected)]
    for name, value in weights[1].items():
        # AdamW makes steps of the learning rate, 1e-2, of gradients that are little more than rounding errors.
        torch.testing.assert_close(weights[0][name], value, atol=1e-4, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.full
@pytest.mark.client("TRL", "DPO, reference computed before", "pp 2")
def test_dpo_with_a_reference_that_was_computed_before(jobs, tmp_path):
    for name, pairs in PAIRS.items():
        rows = [dict(zip(pairs, row, strict=True)) for row in zip(*pairs.values(), strict=True)]
        (tmp_path / f"{name}.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    _check(jobs, tmp_path, "pp 2", _dpo, "llama", adapted=False, precompute_ref_log_probs=True)


def _same_model(tmp_path, family, adapted):
    """Both saved models give the same logits."""
    import transformers as hf

    def load(folder):
        if not adapted:
            return hf.AutoModelForCausalLM.from_pretrained(folder)
        from peft import PeftModel

        return PeftModel.from_pretrained(_model(family), folder)

    ids = torch.randint(3, len(WORDS), (2, 8), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected, found = (load(tmp_path / place / "final").eval()(ids).logits for place in ("alone", "job"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def _cases(trainer):
    for family, adapted in (("gpt2", False), ("llama", False), ("gpt2", True), ("llama", True)):
        for strategy in STRATEGIES:
            if strategy != "one process":
                marks = [pytest.mark.client("TRL", f"{trainer} with LoRA" if adapted else trainer, strategy)]
                if (trainer, family, adapted, strategy) not in SAMPLE:
                    marks.append(pytest.mark.full)
                yield pytest.param(family, adapted, strategy, marks=marks)


@pytest.mark.parametrize(("family", "adapted", "strategy"), list(_cases("SFT")))
def test_sft(jobs, tmp_path, family, adapted, strategy):
    _check(jobs, tmp_path, strategy, _sft, family, adapted)


@pytest.mark.parametrize(("family", "adapted", "strategy"), list(_cases("DPO")))
def test_dpo(jobs, tmp_path, family, adapted, strategy):
    _check(jobs, tmp_path, strategy, _dpo, family, adapted)


def _resumes():
    for adapted in (True, False):
        for strategy in ("pp 2", "tp 2", "sdp 2", "dp 2"):
            marks = [pytest.mark.client("TRL", "SFT with LoRA, resume" if adapted else "SFT, resume", strategy)]
            yield pytest.param(
                adapted, strategy, marks=marks if adapted and strategy == "pp 2" else [*marks, pytest.mark.full]
            )


@pytest.mark.parametrize(("adapted", "strategy"), list(_resumes()))
def test_a_resumed_training(jobs, tmp_path, adapted, strategy):
    """As it would have gone on; and the best of several checkpoints is loaded at the end."""
    more = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }
    whole, best = jobs(strategy, _sft, "llama", adapted, tmp_path / "alone", more)[0]
    resumed = more | {"resume": str(tmp_path / "alone" / "checkpoint-2")}
    logs, evaluated = jobs(strategy, _sft, "llama", adapted, tmp_path / "job", resumed)[0]
    losses = [[entry["loss"] for entry in found if "loss" in entry] for found in (whole, logs)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert evaluated["eval_loss"] == pytest.approx(best["eval_loss"], abs=1e-5)
    assert best["eval_loss"] == pytest.approx(min(e["eval_loss"] for e in whole if "eval_loss" in e), abs=1e-5)
    checkpoint = tmp_path / "alone" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").exists() == adapted
    if adapted:  # the base is in none of its files
        base = sum(4 * p.numel() for p in _model("llama").parameters())
        weights = [file.stat().st_size for file in checkpoint.rglob("model_*.pt")]
        assert sum(weights) < base
    _same_model(tmp_path, "llama", adapted)


@pytest.mark.job
@pytest.mark.parametrize(
    ("objective", "strategy"),
    [
        pytest.param("sft", "pipeline", marks=pytest.mark.client("TRL", "SFT with LoRA, a job of fit()", "pp 2")),
        pytest.param(
            "dpo",
            "sharded",
            marks=[pytest.mark.client("TRL", "DPO with LoRA, a job of fit()", "sdp 2"), pytest.mark.full],
        ),
    ],
)
def test_the_example(tmp_path, objective, strategy):
    import re
    import subprocess
    import sys

    example = Path(__file__).resolve().parents[2] / "examples" / "lora.py"
    command = [sys.executable, str(example), "--objective", objective, "--strategy", strategy, "--steps", "6"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    found = re.search(r"loss=([\d.]+)→([\d.]+) adapters=(\d+) of (\d+)$", result.stdout.strip().splitlines()[-1])
    first, last, adapters, base = (float(number) for number in found.groups())
    assert last < first
    assert adapters < base / 2
