"""Fabric and Lightning's ``Trainer`` with the strategies of this library: losses are those of one process."""

from __future__ import annotations

import pytest
import torch
from support.documents.client_strategies import STAGES, STRATEGIES, replicas, strategy_cases
from support.models.huggingface import tiny_config
from torch.utils.data import DataLoader, DistributedSampler

import smdistributed.modelparallel.torch as smp

BATCH, STEPS, WORDS, LIMIT = 4, 6, 43, 0.4


def _scale():
    """One that does not overflow at first."""
    return {"static_loss_scale": 1024.0} if smp.state.cfg.fp16 else None


def _model():
    import transformers as hf

    torch.manual_seed(7)
    model = hf.AutoModelForCausalLM.from_config(tiny_config("gpt2", WORDS))
    if smp.is_initialized() and smp.tp_size() > 1:
        smp.set_tensor_parallelism(model)
    return model


def _own_names(state, config):
    """Under tensor parallelism a state has the names of the distributed model."""
    return (
        smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2(state) if "tensor_parallel_degree" in config else state
    )


def _rows(replicas):
    return torch.randint(WORDS, (BATCH * STEPS * replicas, 8), generator=torch.Generator().manual_seed(3))


def _alone(replicas, accumulated=2, half=False):
    """Plain PyTorch; a batch is what the distributed sampler gives all replicas in a step."""
    model, rows, losses, norms = _model(), _rows(replicas), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, ids in enumerate(rows.split(BATCH * replicas)):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss / accumulated).backward()
        losses.append(float(loss.detach()))
        if number % accumulated == accumulated - 1:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def _fabric(folder=None, resume=False, precision="32-true"):
    """A loop for Fabric, which saves after the fourth batch, or goes on there."""
    from lightning.fabric import Fabric

    from smdistributed.modelparallel.torch.lightning.fabric import SMPStrategy

    fabric = Fabric(accelerator="cpu", strategy=SMPStrategy(loss_scale=_scale()), precision=precision)
    fabric.launch()
    original = _model()
    model, optimizer = fabric.setup(original, torch.optim.AdamW(original.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(_rows(smp.dp_size() if smp.tp_size() == 1 else smp.rdp_size()), BATCH))

    def forward(ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        fabric.backward(loss / 2)
        return loss

    staged = smp.step(forward)
    state = {"model": model, "optimizer": optimizer, "done": 0}
    if resume:
        fabric.load(f"{folder}/state.ckpt", state)
    losses, norms = [], []
    for number, ids in enumerate(loader):
        if number < state["done"]:
            continue
        last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = staged(ids).reduce_mean() if smp.pp_size() > 1 else forward(ids)
        if last:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=LIMIT)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(fabric.all_gather(loss.detach()).mean()))
        assert float(fabric.all_reduce(loss.detach())) == pytest.approx(losses[-1], abs=1e-6)
        if number == 3 and folder and not resume:
            state["done"] = 4
            fabric.save(f"{folder}/state.ckpt", state)
    fabric.barrier()
    assert fabric.broadcast(smp.rank(), src=1) == 1
    return losses, norms, fabric.is_global_zero


@pytest.mark.parametrize("strategy", strategy_cases("Fabric", "train"))
def test_a_loop_of_fabric(ranks, strategy, tmp_path):
    size, config = STRATEGIES[strategy]
    losses, norms = _alone(replicas(size, config))
    results = ranks(_fabric, size, str(tmp_path), config={"ddp": True, **config}, timeout=100)
    for rank, (found, clipped, is_first) in enumerate(results):
        assert found == pytest.approx(losses, abs=1e-5)
        assert clipped == pytest.approx(norms, rel=1e-4)
        assert is_first == (rank == 0)
    again = ranks(_fabric, size, str(tmp_path), True, config={"ddp": True, **config}, timeout=100)
    for found, clipped, _ in again:
        assert found == pytest.approx(losses[4:], abs=1e-5)
        assert clipped == pytest.approx(norms[2:], rel=1e-4)
    saved = torch.load(tmp_path / "state.ckpt")
    plain = _model()
    plain.load_state_dict(_own_names(saved["model"], config))
    ids = _rows(replicas(size, config))[BATCH * 4 * replicas(size, config) :][: BATCH * replicas(size, config)]
    assert float(plain(input_ids=ids, labels=ids).loss.detach()) == pytest.approx(losses[4], abs=1e-5)


@pytest.mark.parametrize("strategy", strategy_cases("Fabric", "bf16-mixed"))
def test_fabric_in_mixed_precision(ranks, strategy):
    size, config = STRATEGIES[strategy]
    losses, _ = _alone(replicas(size, config), half=True)
    results = ranks(_fabric, size, None, False, "bf16-mixed", config={"ddp": True, **config}, timeout=100)
    for found, _, _ in results:
        assert found == pytest.approx(losses, abs=2e-2)


@pytest.mark.parametrize("strategy", strategy_cases("Fabric", "bf16 and fp16 of the job"))
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_fabric_in_half_precision_of_the_job(ranks, strategy, half):
    size, config = STRATEGIES[strategy]
    losses, norms = _alone(replicas(size, config))
    results = ranks(_fabric, size, config={"ddp": True, half: True, **config}, timeout=100)
    for found, clipped, _ in results:
        assert found == pytest.approx(losses, abs=5e-2)
        assert clipped == pytest.approx(norms, rel=5e-2)


def _trainer(folder, resume=None, precision="32-true"):
    """A module for Lightning's Trainer; the only line of this library is the strategy."""
    import logging

    import lightning.pytorch as pl

    from smdistributed.modelparallel.torch.lightning.pytorch import SMPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Language(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = _model()
            self.seen, self.checked = [], []

        def training_step(self, batch, batch_idx):
            loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
            self.log("loss", loss, sync_dist=True, prog_bar=True)
            return loss

        def validation_step(self, batch, batch_idx):
            loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
            self.log("val_loss", loss, sync_dist=True)
            return {"loss": loss, "words": batch.sum(1)}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append(float(self.trainer.callback_metrics["loss"]))

        def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
            assert outputs["words"].shape == (len(batch),)

        def on_validation_end(self):
            self.checked.append(float(self.trainer.callback_metrics["val_loss"]))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)}

    replicas = smp.dp_size() if smp.tp_size() == 1 else smp.rdp_size()
    saver = pl.callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, filename="{step}")
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=SMPStrategy(loss_scale=_scale()),
        precision=precision,
        max_epochs=1 if resume is None else 2,
        accumulate_grad_batches=2,
        gradient_clip_val=LIMIT,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        num_sanity_val_steps=1,
    )
    module = Language()
    loader = DataLoader(_rows(replicas), BATCH)
    trainer.fit(module, loader, DataLoader(_rows(replicas)[: BATCH * replicas], BATCH), ckpt_path=resume)
    again = trainer.validate(module, DataLoader(_rows(replicas)[: BATCH * replicas], BATCH), verbose=False)
    return module.seen, module.checked, again[0]["val_loss"], saver.best_model_path


def _in_order(replicas, epoch):
    """The rows of an epoch as Lightning's sampler deals them out, which shuffles where there are several replicas."""
    rows = _rows(replicas)
    if replicas == 1:
        return rows.split(BATCH)
    samplers = [DistributedSampler(rows, replicas, rank, shuffle=True) for rank in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return torch.stack([rows[list(sampler)].view(STEPS, BATCH, -1) for sampler in samplers], 1).flatten(1, 2)


def _epochs_alone(replicas, epochs, half=False):
    model, rows, losses, checks = _model(), _rows(replicas), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        for number, ids in enumerate(_in_order(replicas, epoch)):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / 2).backward()
            losses.append(float(loss.detach()))
            if number % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        ids = rows[: BATCH * replicas]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            checks.append(float(model(input_ids=ids, labels=ids).loss))
        model.train()
    return losses, checks


@pytest.mark.parametrize("strategy", strategy_cases("Lightning", "fit, validate, resume"))
def test_a_trainer_of_lightning(ranks, strategy, tmp_path):
    size, config = STRATEGIES[strategy]
    losses, checks = _epochs_alone(replicas(size, config), 2)
    results = ranks(_trainer, size, str(tmp_path), config={"ddp": True, **config}, timeout=100)
    for seen, checked, again, _ in results:
        assert seen == pytest.approx(losses[:STEPS], rel=1e-5)
        assert checked[-1] == pytest.approx(checks[0], rel=1e-5)
        assert again == pytest.approx(checks[0], rel=1e-5)
    best = results[0][3]
    resumed = ranks(_trainer, size, str(tmp_path), best, config={"ddp": True, **config}, timeout=100)
    for seen, checked, _, _ in resumed:
        assert seen == pytest.approx(losses[STEPS:], rel=1e-5)
        assert checked[-1] == pytest.approx(checks[1], rel=1e-5)
    state = {name.removeprefix("model."): value for name, value in torch.load(best)["state_dict"].items()}
    assert _own_names(state, config).keys() >= dict(_model().named_parameters()).keys()


@pytest.mark.parametrize("strategy", strategy_cases("Lightning", "bf16-mixed"))
def test_lightning_in_mixed_precision(ranks, strategy, tmp_path):
    size, config = STRATEGIES[strategy]
    losses, _ = _epochs_alone(replicas(size, config), 1, half=True)
    results = ranks(_trainer, size, str(tmp_path), None, "bf16-mixed", config={"ddp": True, **config}, timeout=100)
    for seen, *_ in results:
        assert seen == pytest.approx(losses, abs=2e-2)


@pytest.mark.parametrize("strategy", strategy_cases("Lightning", "bf16 and fp16 of the job"))
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_lightning_in_half_precision_of_the_job(ranks, strategy, tmp_path, half):
    size, config = STRATEGIES[strategy]
    losses, _ = _epochs_alone(replicas(size, config), 1)
    results = ranks(_trainer, size, str(tmp_path), config={"ddp": True, half: True, **config}, timeout=100)
    for seen, *_ in results:
        assert seen == pytest.approx(losses, abs=5e-2)


def _refuses_manual_optimization():
    import lightning.pytorch as pl

    from smdistributed.modelparallel.torch.lightning.pytorch import SMPStrategy

    class Manual(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 1)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            raise AssertionError("it does not come to this")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    trainer = pl.Trainer(
        accelerator="cpu", strategy=SMPStrategy(), logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with pytest.raises(ValueError, match=r"Manual optimizes by itself .* 2 microbatches; leave it True"):
        trainer.fit(Manual(), DataLoader(torch.ones(4, 2), 2))


@pytest.mark.client("Lightning", "manual optimization is refused", "pp 2")
@pytest.mark.full
def test_manual_optimization_is_refused_where_steps_run_in_microbatches(ranks):
    ranks(_refuses_manual_optimization, 2, config={"ddp": True, **STAGES})
