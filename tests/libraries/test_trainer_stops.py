"""``SMP_AUTO_CHECKPOINT=1`` and Transformers' ``Trainer``: SIGTERM saves its own checkpoint, and the next run goes on there."""

from __future__ import annotations

import json

import pytest

#: What Transformers reads to see that it runs under this library.
VARIABLES = ("SM_HP_MP_PARAMETERS", "SM_FRAMEWORK_PARAMS")


def _train(folder, stop_at, begin_anew=False):
    """Losses of this run's steps, and whether it was stopped; the last rank gets SIGTERM in step ``stop_at``."""
    import os
    import signal

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    import smdistributed.modelparallel.torch as smp

    set_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    ids = torch.randint(11, (64, 8), generator=torch.Generator().manual_seed(2))
    losses = []

    class Noting(Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            if self.state.global_step == stop_at and smp.rank() == smp.size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss

    options = {"output_dir": folder, "per_device_train_batch_size": 2, "max_steps": 16, "save_strategy": "no"}
    more = {"report_to": [], "disable_tqdm": True, "learning_rate": 1e-2}
    trainer = Noting(
        model=model,
        args=TrainingArguments(**options, **more),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    )
    try:
        trainer.train(**({"resume_from_checkpoint": False} if begin_anew else {}))
    except SystemExit as end:
        assert end.code == 0
        return losses, trainer.state.global_step
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return losses, None


@pytest.mark.timeout(300)
def test_trainer_saves_ends_and_goes_on(ranks, tmp_path):
    pytest.importorskip("transformers")
    parameters = {"ddp": True, "partitions": 2, "pipeline_parallel_degree": 2, "microbatches": 2}

    def run(*args, wanted="1"):
        env = dict(zip(VARIABLES, (json.dumps(parameters), '{"sagemaker_mpi_enabled": true}'), strict=True))
        return ranks(_train, 2, *args, config=parameters, env={**env, "SMP_AUTO_CHECKPOINT": wanted}, timeout=200)

    stopped = run(str(tmp_path), 3)
    (step,) = {after for _, after in stopped}
    assert 4 <= step < 16
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    (tmp_path / "checkpoint-99").mkdir()  # of a job that was killed
    resumed = run(str(tmp_path), None)
    whole = run(str(tmp_path), None, True)
    for rank in range(2):
        assert len(whole[rank][0]) == 16
        assert stopped[rank][0] == whole[rank][0][:step]
        assert resumed[rank] == (whole[rank][0][step:], None)
