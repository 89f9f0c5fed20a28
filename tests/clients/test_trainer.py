"""Transformers' ``Trainer``, used as its documents show, trains, evaluates, saves and resumes as in one process."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

WORDS, LENGTH = 43, 12
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 100}
TENSOR = {"tensor_parallel_degree": 2, "prescaled_batch": True}
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
CONTEXT = {"context_parallel_degree": 2}
#: By name the processes, the parameters, and how many batches differ.
STRATEGIES = {
    "pp 2": (2, STAGES, 1),
    "tp 2": (2, TENSOR, 1),
    "sdp 2": (2, SHARDED, 2),
    "dp 2": (2, {}, 2),
    "cp 2": (2, CONTEXT, 1),
    "pp 2 × tp 2": (4, {**STAGES, **TENSOR}, 1),
    "pp 2 × sdp 2": (4, {**STAGES, **SHARDED}, 2),
    "pp 2 × dp 2": (4, STAGES, 2),
    "tp 2 × sdp 2": (4, {**TENSOR, **SHARDED}, 2),
}
#: What Transformers reads to see that it runs under this library.
VARIABLES = ("SM_HP_MP_PARAMETERS", "SM_FRAMEWORK_PARAMS")
BATCH = 4


def _run(ranks, function, strategy, *args, **more):
    size, parameters, _ = STRATEGIES[strategy]
    parameters = {"ddp": True, "partitions": 1, **parameters, **more}
    parameters["partitions"] = parameters.get("pipeline_parallel_degree", 1)
    env = dict(zip(VARIABLES, (json.dumps(parameters), json.dumps({"sagemaker_mpi_enabled": True})), strict=True))
    return ranks(function, size, *args, config=parameters, env=env, timeout=200)


def _data(count, seed, padded=True):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (count, LENGTH), generator=generator)
    labels = ids.clone()
    if padded:  # batches with different numbers of tokens
        for row, length in zip(labels, torch.randint(4, LENGTH + 1, (count,), generator=generator), strict=True):
            row[length:] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


def _script(folder, options, resume=None, more=None):
    return _train_and_more(folder, options, resume, **(more or {}))


def _train_and_more(
    folder, options, resume=None, samples=32, dropout=0.0, do=("train",), predicted=14, patience=0, tokenizer=None
):
    """A user's script, without a line of this library.

    Args:
        patience: evaluations without a better result after which it stops early; 0: never.
        tokenizer: the name of Trainer's argument for one; the data then has sequences of different lengths.
    """
    import numpy as np
    from transformers import (
        EarlyStoppingCallback,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    set_seed(1)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=4, **rates))
    found = {"losses": [], "norms": []}

    class Keep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if "grad_norm" in logs:
                found["norms"].append(float(logs["grad_norm"]))

    def accuracy(result):
        predicted = result.predictions.argmax(-1)
        return {"accuracy": float(np.mean(predicted[:, :-1] == result.label_ids[:, 1:])), "seen": len(predicted)}

    class Noting(Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            found["losses"].append(float(loss))
            return loss

    defaults = {
        "output_dir": folder,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    trainer = Noting(
        model=model,
        args=TrainingArguments(**{**defaults, **options}),
        train_dataset=_of_lengths(_data(samples, 5)) if tokenizer else _data(samples, 5),
        eval_dataset=_data(16, 6),
        callbacks=[Keep(), *([EarlyStoppingCallback(patience)] if patience else [])],
        compute_metrics=accuracy,
        **(_tokenizing(tokenizer) if tokenizer else {}),
    )
    if "train" in do:
        trainer.train(resume_from_checkpoint=resume)
        found["steps"], found["tokens"] = trainer.state.global_step, trainer.state.num_input_tokens_seen
        found["best"] = trainer.state.best_metric
    if "evaluate" in do:
        found["evaluation"] = {
            k: v for k, v in trainer.evaluate().items() if k in ("eval_loss", "eval_accuracy", "eval_seen")
        }
    if "predict" in do:
        output = trainer.predict(_data(predicted, 7))
        found["prediction"] = (output.predictions, output.metrics["test_loss"])
    if "save" in do:
        trainer.save_model(f"{folder}/final")
        found["model"] = (trainer.model.num_parameters(), trainer.model.dtype, trainer.model.device.type)
    if "push" in do:
        with _hub(f"{folder}/hub"):
            trainer.push_to_hub()
    return found


def _of_lengths(data):
    """The same samples, without what is padded."""
    lengths = [int((sample["labels"] != -100).sum()) for sample in data]
    return [{name: row[:length] for name, row in sample.items()} for sample, length in zip(data, lengths, strict=True)]


def _tokenizing(name):
    """Arguments of Trainer: a tokenizer, and what pads by it."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w1")
    return {name: tokenizer, "data_collator": DataCollatorForTokenClassification(tokenizer)}


@contextlib.contextmanager
def _hub(folder):
    """Inside, what is uploaded to the hub is put into a folder instead."""
    import shutil
    from types import SimpleNamespace
    from unittest import mock

    from transformers import trainer

    class Api:
        def create_repo(self, name, **_):
            return SimpleNamespace(repo_id=f"me/{name}", url="")

        def upload_folder(self, folder_path, **_):
            shutil.copytree(folder_path, folder, ignore=shutil.ignore_patterns("checkpoint-*", "smp"))

    api = Api()
    places = {"hf_api": lambda: api, "create_repo": api.create_repo, "upload_folder": api.upload_folder}
    with contextlib.ExitStack() as stack:
        for name, value in places.items():
            if hasattr(trainer, name):
                stack.enter_context(mock.patch.object(trainer, name, value))
        yield


def _alone(folder, factor, options, **more):
    """The same script in one process, which sees batches as large as all ranks' together."""
    import os

    options = {**options, "per_device_train_batch_size": BATCH * factor, "per_device_eval_batch_size": BATCH * factor}
    kept = {name: os.environ.pop(name) for name in VARIABLES}
    try:
        return _train_and_more(folder, options, **more)
    finally:
        os.environ.update(kept)


def _reloaded(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.stack([sample["input_ids"] for sample in _data(14, 7)])).logits


def _both(folder, factor, options, more, resume=None):
    """Under this library, and then alone, in the same process; that on rank 0, as elsewhere Transformers 5 writes no files."""
    import smdistributed.modelparallel.torch as smp

    here = _train_and_more(f"{folder}/here", options, resume and f"{folder}/here/{resume}", **more)
    smp.barrier()
    if smp.rank() > 0:
        return here, None
    alone = _alone(f"{folder}/alone", factor, options, resume=resume and f"{folder}/alone/{resume}", **more)
    if "save" in more.get("do", ()):
        here["saved"], alone["saved"] = _reloaded(f"{folder}/here/final"), _reloaded(f"{folder}/alone/final")
        if smp.pp_size() == 1:  # parameters of other stages are nowhere here
            assert here["model"] == alone["model"]
    return here, alone


ALL = ("train", "evaluate", "predict", "save")
BEST_OF_EACH_STEP = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
}
SAMPLE = ("pp 2",)


def _strategies(*features, sample=SAMPLE, only=STRATEGIES):
    return [
        pytest.param(
            name,
            marks=[
                *(pytest.mark.client("Trainer", feature, name) for feature in features),
                *([] if name in sample else [pytest.mark.full]),
            ],
        )
        for name in only
    ]


def _check(results, tolerance=1e-5):
    """Averages of all ranks are those of one process."""
    alone = results[0][1]
    for step, values in enumerate(zip(*(here["losses"] for here, _ in results), strict=True)):
        assert sum(values) / len(values) == pytest.approx(alone["losses"][step], abs=tolerance)
    for here, _ in results:
        assert len(here["losses"]) == len(alone["losses"])
        assert here["norms"] == pytest.approx(alone["norms"], abs=10 * tolerance)
        assert here.get("tokens") == alone.get("tokens")
        if "evaluation" in here:
            assert here["evaluation"] == pytest.approx(alone["evaluation"], abs=tolerance)
        if "prediction" in here:
            for mine, other in zip(here["prediction"], alone["prediction"], strict=True):
                torch.testing.assert_close(
                    torch.tensor(mine), torch.tensor(other), atol=100 * tolerance, rtol=100 * tolerance
                )
        if "saved" in here:
            torch.testing.assert_close(here["saved"], alone["saved"], atol=100 * tolerance, rtol=100 * tolerance)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", _strategies("train", "gradient accumulation", "evaluate", "predict", "save_model"))
def test_a_run_is_that_of_one_process(ranks, tmp_path, strategy):
    # 30 samples: the last update of an epoch has fewer and shorter batches, and 14 predictions do not divide either. Data
    # parallel ranks would fill up their last batch from the beginning, as under DDP.
    samples, predicted = (30, 14) if STRATEGIES[strategy][2] == 1 else (32, 16)
    options = {
        "max_steps": -1,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": 2 if samples == 32 else 3,
        "include_num_input_tokens_seen": True,
    }
    more = {"do": ALL, "samples": samples, "predicted": predicted}
    _check(_run(ranks, _both, strategy, str(tmp_path), STRATEGIES[strategy][2], options, more))


def _resumed(ranks, strategy, folder, options, more, **parameters):
    """By rank, an uninterrupted run, and one from the checkpoint in its middle."""
    options = {"save_strategy": "steps", "save_steps": 2, **options}
    whole = _run(ranks, _script, strategy, f"{folder}/whole", options, None, more, **parameters)
    checkpoint = f"{folder}/whole/checkpoint-2"
    return list(
        zip(
            whole,
            _run(ranks, _script, strategy, f"{folder}/again", options, checkpoint, more, **parameters),
            strict=True,
        )
    )


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", _strategies("resume"))
def test_a_resumed_run_goes_on_where_it_was(ranks, tmp_path, strategy):
    for whole, again in _resumed(ranks, strategy, tmp_path, {}, {"dropout": 0.1}):
        assert len(again["losses"]) == 2
        assert again["losses"] == whole["losses"][2:]
        assert again["norms"] == whole["norms"][2:]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", _strategies("bf16 and fp16", only=("pp 2", "tp 2", "sdp 2", "dp 2", "cp 2")))
def test_half_precision_trains_and_resumes(ranks, tmp_path, strategy, half):
    results = _resumed(ranks, strategy, tmp_path, {half: True}, {"do": ("train", "evaluate")}, **{half: True})
    for whole, again in results:
        assert again["losses"] == whole["losses"][2:]
        assert again["evaluation"] == whole["evaluation"]
    full = _run(ranks, _both, strategy, str(tmp_path), STRATEGIES[strategy][2], {}, {})[0][1]
    of_all = zip(*(whole["losses"] for whole, _ in results), strict=True)
    assert [sum(losses) / len(losses) for losses in of_all] == pytest.approx(full["losses"], rel=0.05)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", _strategies("load_best_model_at_end", "gradient checkpointing"))
def test_the_best_model_is_loaded_at_the_end(ranks, tmp_path, strategy):
    options = {
        **BEST_OF_EACH_STEP,
        "learning_rate": 0.1,  # grows worse, so that the best is not the last
        "gradient_checkpointing": True,
    }
    more = {"do": ("train", "evaluate", "save")}
    results = _run(ranks, _both, strategy, str(tmp_path), STRATEGIES[strategy][2], options, more)
    _check(results, tolerance=1e-4)
    for here, _ in results:
        assert here["best"] == pytest.approx(results[0][1]["best"], abs=1e-4)
        assert here["evaluation"]["eval_loss"] == pytest.approx(here["best"], abs=1e-6)


def _whole_and_resumed(folder, options, more):
    import smdistributed.modelparallel.torch as smp

    whole = _both(folder, 1, options, more)
    smp.barrier()
    return whole, _both(folder, 1, options, more, resume="checkpoint-2")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["tp 2"])
def test_a_life_of_a_model_is_that_of_one_process(ranks, tmp_path, strategy):
    """Trains, evaluates, saves, ends with the best model, and goes on from a checkpoint, at every point as alone."""
    options = {**BEST_OF_EACH_STEP, "learning_rate": 0.1}
    more = {"do": ("train", "evaluate", "save"), "samples": 16}
    results = _run(ranks, _whole_and_resumed, strategy, str(tmp_path), options, more)
    for runs in zip(*results, strict=True):
        _check(runs, tolerance=1e-4)
        for here, _ in runs:
            assert here["best"] == pytest.approx(runs[0][1]["best"], abs=1e-4)
    assert len(results[0][1][0]["losses"]) == 2


@pytest.mark.full
@pytest.mark.parametrize("strategy", _strategies("evaluate without training", only=("tp 2", "sdp 2", "dp 2", "cp 2")))
def test_a_model_is_evaluated_as_it_is(ranks, tmp_path, strategy):
    more = {"do": ("evaluate", "predict"), "predicted": 14 if STRATEGIES[strategy][2] == 1 else 16}
    _check(_run(ranks, _both, strategy, str(tmp_path), STRATEGIES[strategy][2], {}, more))


def _other_degrees(folder, resume):
    return _script(f"{folder}/out", {"save_strategy": "steps", "save_steps": 2}, resume=resume)


@pytest.mark.full
@pytest.mark.client("Trainer", "resume with other degrees", "tp 2")
@pytest.mark.client("Trainer", "resume with other degrees", "pp 2")
def test_a_checkpoint_resumes_with_other_degrees(ranks, tmp_path):
    whole = _run(ranks, _other_degrees, "pp 2", str(tmp_path / "a"), None)
    again = _run(ranks, _other_degrees, "tp 2", str(tmp_path / "b"), str(tmp_path / "a" / "out" / "checkpoint-2"))
    assert again[0]["losses"] == pytest.approx(whole[0]["losses"][2:], abs=1e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", _strategies("label smoothing", only=("pp 2", "sdp 2", "cp 2")))
def test_labels_are_smoothed(ranks, tmp_path, strategy):
    options = {"label_smoothing_factor": 0.1, "max_steps": 2}
    results = _run(
        ranks, _both, strategy, str(tmp_path), STRATEGIES[strategy][2], options, {"do": ("train", "evaluate")}
    )
    _check(results)
    plain = _run(ranks, _script, strategy, str(tmp_path), {"max_steps": 1})
    assert abs(plain[0]["losses"][0] - results[0][0]["losses"][0]) > 1e-4


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", _strategies("early stopping", only=("pp 2", "tp 2", "sdp 2", "cp 2")))
def test_a_run_stops_early(ranks, tmp_path, strategy):
    options = {
        **BEST_OF_EACH_STEP,
        "learning_rate": 0.1,
        "max_steps": 12,
    }
    more = {"do": ("train", "evaluate"), "patience": 1}
    results = _run(ranks, _both, strategy, str(tmp_path), STRATEGIES[strategy][2], options, more)
    _check(results, tolerance=1e-4)
    alone = results[0][1]
    for here, _ in results:
        assert here["steps"] == alone["steps"] < 12
        assert here["best"] == pytest.approx(alone["best"], abs=1e-4)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", _strategies("samples grouped by length", only=("pp 2", "tp 2", "cp 2")))
def test_samples_are_grouped_by_length(ranks, tmp_path, strategy):
    """As in one process, so with data parallelism only the batches are others."""
    import transformers

    is_old = int(transformers.__version__.partition(".")[0]) < 5
    options = {"group_by_length": True} if is_old else {"train_sampling_strategy": "group_by_length"}
    more = {"tokenizer": "tokenizer" if is_old else "processing_class"}
    _check(_run(ranks, _both, strategy, str(tmp_path), 1, options, more))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", _strategies("push_to_hub", only=("pp 2", "tp 2", "sdp 2", "dp 2", "cp 2")))
def test_the_whole_model_is_pushed(ranks, tmp_path, strategy):
    """What would be uploaded loads in plain Transformers."""
    options = {"save_strategy": "steps", "save_steps": 2}
    _run(
        ranks,
        _script,
        strategy,
        str(tmp_path),
        options,
        None,
        {"do": ("train", "save", "push"), "tokenizer": "processing_class"},
    )
    torch.testing.assert_close(_reloaded(tmp_path / "hub"), _reloaded(tmp_path / "final"), atol=0, rtol=0)
    assert {"README.md", "tokenizer.json"} <= {file.name for file in (tmp_path / "hub").iterdir()}
