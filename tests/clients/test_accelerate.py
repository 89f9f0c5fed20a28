"""Scripts written for Accelerate: the plain ``Accelerator`` prepares, trains, gathers and saves under every strategy."""

from __future__ import annotations

import pytest
import torch
from support.documents.client_strategies import SHARDED, STAGES, STRATEGIES, replicas, strategy_cases
from support.models.huggingface import tiny_config
from torch.utils.data import DataLoader

import smdistributed.modelparallel.torch as smp

BATCH, SAMPLES, WORDS = 4, 18, 43
LIMIT = 0.4


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


@pytest.mark.parametrize("strategy", strategy_cases("Accelerate", "train", always=("pp 2",)))
def test_training_is_that_of_one_process(ranks, strategy):
    size, config = STRATEGIES[strategy]
    results = ranks(_train, size, config={"ddp": True, **config}, timeout=100)
    processes = results[0]["processes"]
    assert processes == replicas(size, config)
    wanted = _alone(processes)
    for result in results:
        assert result["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
        assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
        assert result["rate"] == pytest.approx(wanted["rate"])
        assert result["kind"].startswith("GPT2LMHead") or "tp" in strategy
    assert [result["main"] for result in results] == [True, *[False] * (size - 1)]


@pytest.mark.parametrize("strategy", strategy_cases("Accelerate", "save_state, load_state", always=("sdp 2",)))
def test_what_save_state_saves_goes_on_in_another_job(ranks, strategy, tmp_path):
    size, config = STRATEGIES[strategy]
    folder = str(tmp_path / "state")
    first = ranks(_train, size, folder, config={"ddp": True, **config}, timeout=100)
    second = ranks(_train, size, folder, True, config={"ddp": True, **config}, timeout=100)
    for before, after in zip(first, second, strict=True):
        assert after["losses"] == pytest.approx(before["losses"][2:], abs=1e-6)
        assert after["rate"] == pytest.approx(before["rate"])


@pytest.mark.client("Accelerate", "load_state with other degrees", "sdp 2")
@pytest.mark.full
def test_a_state_loads_with_other_degrees(ranks, tmp_path):
    folder = str(tmp_path / "state")
    first = ranks(_train, 4, folder, config={"ddp": True, **STAGES}, timeout=100)
    second = ranks(_train, 2, folder, True, config={"ddp": True, **SHARDED}, timeout=100)
    assert second[0]["losses"] == pytest.approx(first[0]["losses"][2:], abs=1e-5)


@pytest.mark.parametrize("strategy", strategy_cases("Accelerate", "bf16, autocast"))
def test_autocast_is_that_of_one_process(ranks, strategy):
    size, config = STRATEGIES[strategy]
    results = ranks(_train, size, None, False, 4, "bf16", config={"ddp": True, **config}, timeout=100)
    wanted = _alone(results[0]["processes"], "bf16")
    for result in results:
        assert result["losses"] == pytest.approx(wanted["losses"], abs=2e-2)


@pytest.mark.parametrize("strategy", strategy_cases("Accelerate", "bf16 and fp16 of the job"))
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_half_precision_of_the_job(ranks, strategy, half):
    size, config = STRATEGIES[strategy]
    results = ranks(_train, size, None, False, 4, half, config={"ddp": True, half: True, **config}, timeout=100)
    wanted = _alone(results[0]["processes"])
    for result in results:
        assert result["losses"] == pytest.approx(wanted["losses"], abs=5e-2)


def _parts(folder):
    """What scripts call beside training, with two stages and two replicas."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

    def refused(call):
        with pytest.raises(ValueError, match=".") as raised:
            call()
        return str(raised.value)

    seen = {"fsdp": refused(lambda: Accelerator(cpu=True, fsdp_plugin=object.__new__(FullyShardedDataParallelPlugin)))}
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
    original = _model()
    optimizer = torch.optim.AdamW(original.parameters(), lr=1e-2)
    loader = DataLoader(range(10), batch_size=4)
    shuffled = DataLoader(range(8), batch_size=2, shuffle=True)
    model, optimizer, loader, shuffled = accelerator.prepare(original, optimizer, loader, shuffled)
    assert accelerator.prepare(model) is model
    assert isinstance(model, smp.DistributedModel)
    index = accelerator.process_index
    seen["batches"] = [batch.tolist() for batch in loader]
    seen["metrics"] = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    seen["objects"] = [n for batch in loader for n in accelerator.gather_for_metrics([str(n) for n in batch.tolist()])]
    seen["shuffled"] = [accelerator.gather(batch).tolist() for batch in shuffled]
    seen["sum"] = accelerator.reduce({"n": torch.tensor([1.0 + index])})["n"].item()
    seen["mean"] = accelerator.reduce(torch.tensor(1.0 + index), "mean").item()
    seen["padded"] = accelerator.pad_across_processes(torch.ones(1, 1 + index), dim=1, pad_index=7).tolist()
    with accelerator.split_between_processes(["a", "b", "c", "d"]) as mine:
        seen["mine"] = mine
    ids = torch.randint(WORDS, (4, 8), generator=torch.Generator().manual_seed(index))
    seen["outside"] = refused(lambda: model(input_ids=ids))

    @smp.step
    def step(ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        return loss

    step(ids)
    optimizer.step()
    accelerator.save_model(model, folder)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        f"{folder}/hf",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    seen["scale"] = optimizer.loss_scale  # a method of smp.DistributedOptimizer
    accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    seen["two optimizers"] = refused(lambda: accelerator.save_state(f"{folder}/state"))
    accelerator.wait_for_everyone()
    seen["state"] = {name: value.tolist() for name, value in model.state_dict().items() if "ln_f" in name}
    accelerator.end_training()
    return seen


@pytest.mark.client("Accelerate", "gather_for_metrics, save_model, unwrap_model", "pp 2 × dp 2")
@pytest.mark.full
def test_what_else_scripts_call(ranks, tmp_path):
    import transformers as hf
    from safetensors.torch import load_file

    results = ranks(_parts, 4, str(tmp_path), config={"ddp": True, **STAGES}, timeout=100)
    first, stage, other = results[0], results[1], results[2]
    assert first["batches"] == stage["batches"] == [[0, 1, 2, 3], [8, 9, 0, 1]]
    assert other["batches"] == [[4, 5, 6, 7], [2, 3, 4, 5]]
    assert [number for batch in first["metrics"] for number in batch] == list(range(10))
    assert first["objects"] == [str(number) for number in range(10)]
    assert all(result["shuffled"] == first["shuffled"] for result in results)
    drawn = [number for batch in first["shuffled"] for number in batch]
    assert sorted(drawn) == list(range(8)) != drawn
    assert [result["mine"] for result in results] == [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]
    assert (first["sum"], first["mean"]) == (3.0, 1.5)
    assert (first["padded"], other["padded"]) == ([[1.0, 7.0]], [[1.0, 1.0]])
    assert "leave it out" in first["fsdp"]
    assert "smp.step" in first["outside"]
    assert "2 optimizers" in first["two optimizers"]
    saved = load_file(tmp_path / "model.safetensors")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for name, value in first["state"].items():
        assert saved[name].tolist() == again[name].tolist() == value


def _refuses_another_type():
    from accelerate import Accelerator

    with pytest.raises(ValueError, match=r"the job trains in bf16, .*fp16.*leave mixed_precision out"):
        Accelerator(mixed_precision="fp16")


@pytest.mark.full
def test_another_type_than_the_jobs_is_refused(ranks):
    ranks(_refuses_another_type, 2, config={"ddp": True, "bf16": True})


def test_alone_it_is_accelerates_own():
    from accelerate import Accelerator

    assert type(Accelerator(cpu=True)) is Accelerator


def _begins_without_init():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return type(accelerator).__name__, accelerator.num_processes, smp.size()


@pytest.mark.full
def test_an_accelerator_joins_the_job_that_its_rank_belongs_to(ranks):
    job = {"SM_HP_MP_PARAMETERS": '{"ddp": true}'}
    assert ranks(_begins_without_init, 2, init=False, env=job) == [("JobAccelerator", 2, 2)] * 2
