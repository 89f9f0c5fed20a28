"""Scripts written for Accelerate: the plain ``Accelerator`` prepares, trains, gathers and saves under every strategy."""

from __future__ import annotations

import pytest
import torch
from support.huggingface import tiny_config
from torch.utils.data import DataLoader

import smdistributed.modelparallel.torch as smp

BATCH, SAMPLES, WORDS = 4, 18, 43
LIMIT = 0.4
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 100, "sdp_gradient_clipping": 1e6}
TENSOR = {"tensor_parallel_degree": 2, "prescaled_batch": True}
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
STRATEGIES = {
    "dp 2": (2, {}),
    "pp 2": (2, STAGES),
    "tp 2": (2, TENSOR),
    "sdp 2": (2, SHARDED),
    "pp 2 × dp 2": (4, STAGES),
    "pp 2 × tp 2": (4, {**STAGES, **TENSOR}),
    "pp 2 × sdp 2": (4, {**STAGES, **SHARDED}),
    "tp 2 × sdp 2": (4, {**TENSOR, **SHARDED}),
    "tp 2 × dp 2": (4, TENSOR),
}


def _model():
    import transformers as hf

    torch.manual_seed(7)
    return hf.AutoModelForCausalLM.from_config(tiny_config("gpt2", WORDS))


def _samples(size):
    everything = torch.randint(WORDS, (SAMPLES // 2 * 2 * size, 8), generator=torch.Generator().manual_seed(3))
    return [
        {"input_ids": row, "number": torch.tensor(number)} for number, row in enumerate(everything[: 16 * size + 2])
    ]


def _train(folder=None, resume=False, stop=4, half="no", wrapped=False, epochs=1):
    """A script for Accelerate; the only line of this library is the step function that a pipeline needs."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=half)
    original = _model()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(original)
    if wrapped:
        original = smp.DistributedModel(original)
    optimizer = torch.optim.AdamW(original.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(_samples(accelerator.num_processes), batch_size=BATCH, drop_last=True)
    model, optimizer, loader, schedule = accelerator.prepare(original, optimizer, loader, schedule)

    def forward(ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        return loss

    step = forward
    if smp.is_initialized() and smp.pp_size() > 1:
        staged = smp.step(forward)
        step = lambda ids: staged(ids).reduce_mean()  # noqa: E731 - what a script does
    losses, norms, done = [], [], 0
    if resume:
        accelerator.load_state(folder)
        done = 2
        loader = accelerator.skip_first_batches(loader, done)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = step(batch["input_ids"])
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), LIMIT)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
        done += 1
        if folder and not resume and done == 2:
            accelerator.save_state(folder)
        if done == stop:
            break
    return {
        "losses": losses,
        "norms": norms,
        "rate": schedule.get_last_lr()[0],
        "processes": accelerator.num_processes,
        "main": accelerator.is_main_process,
        "kind": type(accelerator.unwrap_model(model)).__name__,
    }


def _alone(processes, half=None):
    """The same in plain PyTorch, with the batches of all processes in one."""
    model, size = _model(), BATCH * processes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for number, ids in enumerate(torch.stack([s["input_ids"] for s in _samples(processes)])[: 4 * size].split(size)):
        with torch.autocast("cpu", torch.bfloat16, enabled=half == "bf16"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss / 2).backward()
        losses.append(float(loss.detach()))
        if number % 2:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9**processes
    return {"losses": losses, "norms": norms, "rate": optimizer.param_groups[0]["lr"]}


def _cases(feature, always=()):
    found = []
    for strategy in STRATEGIES:
        marks = [pytest.mark.client("Accelerate", feature, strategy)]
        found.append(pytest.param(strategy, marks=marks if strategy in always else [*marks, pytest.mark.full]))
    return found


@pytest.mark.parametrize("strategy", _cases("train", always=("pp 2", "sdp 2")))
def test_training_is_that_of_one_process(ranks, strategy):
    size, config = STRATEGIES[strategy]
    results = ranks(_train, size, config={"ddp": True, **config}, timeout=100)
    processes = results[0]["processes"]
    assert processes == size // config.get("pipeline_parallel_degree", 1) // config.get("tensor_parallel_degree", 1)
    wanted = _alone(processes)
    for result in results:
        assert result["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
        assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
        assert result["rate"] == pytest.approx(wanted["rate"])
        assert result["kind"].startswith("GPT2LMHead") or "tp" in strategy
    assert [result["main"] for result in results] == [True, *[False] * (size - 1)]


@pytest.mark.parametrize("strategy", _cases("save_state, load_state", always=("pp 2",)))
def test_what_save_state_saves_goes_on_in_another_job(ranks, strategy, tmp_path):
    size, config = STRATEGIES[strategy]
    folder = str(tmp_path / "state")
    first = ranks(_train, size, folder, config={"ddp": True, **config}, timeout=100)
    second = ranks(_train, size, folder, True, config={"ddp": True, **config}, timeout=100)
    for before, after in zip(first, second, strict=True):
        assert after["losses"] == pytest.approx(before["losses"][2:], abs=1e-6)
        assert after["rate"] == pytest.approx(before["rate"])


@pytest.mark.parametrize("strategy", _cases("bf16, autocast"))
def test_autocast_is_that_of_one_process(ranks, strategy):
    size, config = STRATEGIES[strategy]
    results = ranks(_train, size, None, False, 4, "bf16", config={"ddp": True, **config}, timeout=100)
    wanted = _alone(results[0]["processes"], "bf16")
    for result in results:
        assert result["losses"] == pytest.approx(wanted["losses"], abs=2e-2)


@pytest.mark.parametrize("strategy", _cases("bf16 and fp16 of the job"))
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_half_precision_of_the_job(ranks, strategy, half):
    size, config = STRATEGIES[strategy]
    results = ranks(_train, size, None, False, 4, half, config={"ddp": True, half: True, **config}, timeout=100)
    wanted = _alone(results[0]["processes"])
    for result in results:
        assert result["losses"] == pytest.approx(wanted["losses"], abs=5e-2)
