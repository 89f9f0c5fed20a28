"""Adapters, and nothing else, are gathered from wherever their parts are, and loaded again; PEFT is a stand-in here."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import CheckpointError, SMPUserError

SHARDS = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 10, "sdp_gradient_clipping": 1e6}
CASES = {
    "pp 2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "sdp 2": (2, SHARDS),
    "pp 2 × sdp 2": (4, {"pipeline_parallel_degree": 2, **SHARDS}),
}


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(8, 8).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})

    def forward(self, x):
        return x + torch.tanh(self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)))


class Model(nn.Module):
    """Has what PEFT's models have."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Adapted() for _ in range(4))
        self.peft_config = {"default": object()}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def save_pretrained(self, folder, state_dict=None, is_main_process=True, **options):
        from pathlib import Path

        import peft

        assert set(options) == {"safe_serialization", "selected_adapters", "save_embedding_layers"}
        if is_main_process:
            Path(folder).mkdir(parents=True)
            torch.save(peft.get_peft_model_state_dict(self, state_dict), Path(folder) / "adapter_model.bin")


def _stand_in():
    made = types.ModuleType("peft")

    def get(model, state_dict, adapter_name="default", **_):
        past = {"prompt": torch.ones(1)} if hasattr(model, "has_prompt") else {}
        return {n.replace(".default", ""): value for n, value in state_dict.items() if "lora" in n} | past

    def load(folder, device):
        return torch.load(f"{folder}/adapter_model.bin", weights_only=True)

    def put(model, state, adapter_name):
        own = model.state_dict()  # PEFT looks at names
        named = {name.replace("_A.", "_A.default.").replace("_B.", "_B.default."): v for name, v in state.items()}
        assert set(named) <= set(own)
        return model.load_state_dict(named, strict=False)

    made.get_peft_model_state_dict, made.load_peft_weights, made.set_peft_model_state_dict = get, load, put
    sys.modules["peft"] = made


def _run(folder):
    from smp_runtime.model.state_dict import ModelState

    _stand_in()
    try:
        model = smp.DistributedModel(Model())
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(trained, lr=0.1))

        @smp.step
        def step(x):
            loss = model(x).pow(2).mean()
            model.backward(loss)
            return loss

        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
        step(x)
        optimizer.step()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        gathered, whole = [], ModelState._whole

        def counted(self, only):
            for name, value in whole(self, only):
                gathered.append(name)
                yield name, value

        ModelState._whole = counted
        try:
            model.save_pretrained(f"{folder}/adapters")
        finally:
            ModelState._whole = whole
        smp.barrier()
        step(x)
        optimizer.step()
        moved = {name: value.clone() for name, value in model.state_dict().items()}
        smp.resume_from_checkpoint(folder, tag="adapters", partial=False, load_optimizer=False)
        after = {name: value.clone() for name, value in model.state_dict().items()}
        names = [name for name, value in moved.items() if not torch.equal(value, before[name])]
        model.module.peft_config["default"] = object()
        model.module.layers[0].lora_A["default"].register_buffer("more", torch.ones(1))
        try:
            smp.resume_from_checkpoint(folder, tag="adapters", partial=False, load_optimizer=False)
            said = ""
        except CheckpointError as error:
            said = str(error)
        model.module.has_prompt = True
        with pytest.raises(SMPUserError, match="it reads 'prompt' of adapter 'default' from the module itself"):
            model.save_pretrained(f"{folder}/prompts")
        return before, after, names, gathered, said
    finally:
        del sys.modules["peft"]


@pytest.mark.parametrize("case", ["pp 2", "sdp 2", pytest.param("pp 2 × sdp 2", marks=pytest.mark.full)])
def test_adapters_are_saved_and_loaded(ranks, tmp_path, case):
    size, config = CASES[case]
    for before, after, moved, gathered, said in ranks(_run, size, str(tmp_path), config={"ddp": True, **config}):
        assert len(moved) == 8
        assert all("lora" in name for name in gathered)
        for name, value in before.items():
            assert torch.equal(after[name], value), name
        assert "are not those of 'default' in this model: missing ['layers.0.lora_A.default.more'] of 1" in said
    saved = torch.load(tmp_path / "adapters" / "adapter_model.bin", weights_only=True)
    assert len(saved) == 8
    for name, value in saved.items():
        assert torch.equal(value, before[name.replace("_A.", "_A.default.").replace("_B.", "_B.default.")])


def test_an_optimizer_with_an_empty_group_goes_on(solo, tmp_path):
    """As ``Trainer`` makes it where no norm or bias is trained."""
    solo({})
    model = smp.DistributedModel(nn.Linear(2, 2))
    groups = [{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.0}]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    smp.save_checkpoint(str(tmp_path), tag="t", partial=True, model=model, optimizer=optimizer)
    smp.resume_from_checkpoint(str(tmp_path), tag="t")
    assert len(optimizer.param_groups) == 2
