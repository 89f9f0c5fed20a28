"""``Seq2SeqTrainer`` with ``predict_with_generate`` predicts what it predicts in one process."""

from __future__ import annotations

import json
import os

import pytest
import torch
from support.documents.client_strategies import STRATEGIES, replicas, strategy_cases
from support.models.huggingface import tiny_model

#: What Transformers reads to see that it runs under this library.
VARIABLES = ("SM_HP_MP_PARAMETERS", "SM_FRAMEWORK_PARAMS")
BATCH, WORDS = 2, 43


def _data(count, seed):
    """Some labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (count, 6), generator=generator)
    labels = ids.flip(1)
    labels[::2, 4:] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


def _script(folder, factor=1):
    """A user's script, without a line of this library."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

    set_seed(1)
    options = {
        "output_dir": folder,
        "per_device_train_batch_size": BATCH * factor,
        "per_device_eval_batch_size": BATCH * factor,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "predict_with_generate": True,
        "generation_max_length": 9,
        "generation_num_beams": 2,
        "label_smoothing_factor": 0.1,
    }
    model = tiny_model("t5", WORDS)

    def collate(
        samples,
    ):  # as DataCollatorForSeq2Seq does, which needs a tokenizer: a loss that is smoothed takes the labels away
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}

    arguments = Seq2SeqTrainingArguments(**options)
    trainer = Seq2SeqTrainer(model=model, args=arguments, data_collator=collate, train_dataset=_data(16, 1))
    trainer.train()
    found = trainer.predict(_data(7, 2))
    return found.predictions.tolist(), found.metrics["test_loss"]


def _both(folder, factor):
    """Under this library, and then alone in the same process, with batches as large as all replicas' together."""
    import smdistributed.modelparallel.torch as smp

    here = _script(f"{folder}/here")
    smp.barrier()
    kept = {name: os.environ.pop(name) for name in VARIABLES}
    try:
        return here, _script(f"{folder}/alone{smp.rank()}", factor)
    finally:
        os.environ.update(kept)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy", strategy_cases("Trainer", "`Seq2SeqTrainer`, `predict_with_generate`", always=("pp 2",))
)
def test_predictions_are_those_of_one_process(ranks, tmp_path, strategy):
    size, parameters = STRATEGIES[strategy]
    parameters = {"ddp": True, "partitions": parameters.get("pipeline_parallel_degree", 1), **parameters}
    env = dict(zip(VARIABLES, (json.dumps(parameters), json.dumps({"sagemaker_mpi_enabled": True})), strict=True))
    count = replicas(size, parameters)
    for here, alone in ranks(_both, size, str(tmp_path), count, config=parameters, env=env, timeout=200):
        # The trainer keeps the samples that fill up the last batch of replicas, on any number of processes.
        assert here[0][: len(alone[0])] == alone[0]
        if count == 1:  # else a mean of means over unequal numbers of labels
            assert here[1] == pytest.approx(alone[1], abs=1e-5)
