"""What pages presuppose of their readers, block by block: models, loaders, files, and the degrees that a passage is about."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from support.documents.doc_runs import Names, scene
from support.documents.doc_stand_ins import CLASSES, WIDTH, Small, batch, gpt2, nothing, training, wrapped_gpt2

DDP = {"ddp": True, "microbatches": 2}

# -- by page -------------------------------------------------------------------------------------------------

scene("README.md", "model = smp.DistributedModel(MyModel())")(nothing)


@scene("README.md", 'entry_point="train_gpt.py"')
def _(names: Names) -> None:
    Path("entrypoints").mkdir()
    Path("entrypoints/train_gpt.py").write_text("import smdistributed.modelparallel.torch as smp\n")


scene("accelerate.md", "accelerator.prepare")(nothing)
scene("activation-checkpointing.md", 'strategy="group_4"', config=DDP)(nothing)


@scene("activation-checkpointing.md", "checkpoint_sequential", config=DDP)
def _(names: Names) -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x * mask)

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    names["self"] = SimpleNamespace(layer=Masked(WIDTH, WIDTH), layers=layers)
    names["mask"] = torch.ones(WIDTH)


@scene("checked-streams.md", "from smp_emulation.checked import emulated", instead={"range(50)": "range(3)"})
def _(names: Names) -> None:
    names["train"] = lambda device: torch.ones(4, device=device).sum().item()


@scene("checkpoints.md", "num_kept_partial_checkpoints=3", config=DDP)
def _(names: Names) -> None:
    training(names)
    names["step"] = 100


def _read_back(names: Names) -> None:
    assert names["weight"].shape == (CLASSES, WIDTH)
    names["reader"].close()


@scene("how-it-works/checkpoints.md", "reader.whole", config=DDP, then=_read_back)
def _(names: Names) -> None:
    training(names)
    names["smp"].save_checkpoint("checkpoints", tag="100")


scene("checkpoints.md", "AutoModelForCausalLM", config=DDP, full=True)(wrapped_gpt2)


@scene("checkpoints.md", "load_optimizer=False", config=DDP, full=True)
def _(names: Names) -> None:
    gpt2().save_pretrained("gpt2")
    wrapped_gpt2(names)


@scene("compatibility.md", 'source_dir="gpt2"')
def _(names: Names) -> None:
    Path("gpt2").mkdir()
    Path("gpt2/train_gpt_simple.py").write_text("import smdistributed.modelparallel.torch as smp\n")
    names |= {"hyperparameters": {"epochs": 1}, "mpioptions": "-verbose", "parameters": {"partitions": 2, "ddp": True}}


@scene("data.md", "loader = smp.data.DataLoader(dataset", config=DDP)
def _(names: Names) -> None:
    training(names)
    names["dataset"] = torch.utils.data.TensorDataset(torch.randn(24, WIDTH))


scene("generation.md", "do_sample=True", config=DDP, full=True)(wrapped_gpt2)


@scene("hangs.md", "long_phase", config=DDP)
def _(names: Names) -> None:
    names["upload"] = lambda folder: time.sleep(0.01)


scene("hangs.md", "model.join()", config=DDP)(training)
scene("hangs.md", "SMP_FAULTS")(nothing)


@scene("lora.md", "get_peft_model", config=DDP, needs=("peft",), full=True)
def _(names: Names) -> None:
    gpt2().save_pretrained("base")


def _one_job_is_refused_by_nobody(names: Names) -> None:
    names["SMPEstimator"](..., distribution=names["distribution"]).hyperparameters()


@scene("how-it-works/mixtures.md", "MoEConfig(")
def _(names: Names) -> None:
    from support.models.version2_mixtures import make_listed

    names["model"] = make_listed()


scene("numerics.md", "deterministic", then=_one_job_is_refused_by_nobody)(nothing)
scene("pipeline-parallelism.md", "distribution = {", then=_one_job_is_refused_by_nobody)(nothing)
scene("context-parallelism.md", "distribution = {", then=_one_job_is_refused_by_nobody)(nothing)
scene("sharded-data-parallelism.md", "distribution = {", then=_one_job_is_refused_by_nobody)(nothing)

_PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0}


@scene("pipeline-parallelism.md", "smp.partition(1)", config=_PIPELINE, ranks=2, full=True, instead={"...": "wrap()"})
def _(names: Names) -> None:
    made = names["self"] = Small()
    names["Decoder"] = lambda: nn.Linear(WIDTH, WIDTH)
    names["wrap"] = lambda: names.update(model=names["smp"].DistributedModel(made))


@scene("pipeline-parallelism.md", "checkpoint_s3_uri=uri")
def _(names: Names) -> None:
    names["uri"] = Path("outside").absolute().as_uri()


_WRITTEN = {"pipeline_parallel_degree": 2, "microbatches": 2, "partition_file": "checkpoints/partition.json"}


@scene("pipeline-parallelism.md", "read_partition", config=_WRITTEN, ranks=2, full=True)
def _(names: Names) -> None:
    os.makedirs("checkpoints", exist_ok=True)
    training(names)
    names["smp"].barrier()


@scene(
    "how-it-works/pipeline-parallelism.md",
    "model.module.student",
    config=_PIPELINE,
    ranks=2,
    full=True,
    instead={"...": "go()"},
)
def _(names: Names) -> None:
    smp = names["smp"]
    names["model"] = smp.DistributedModel(names["model"])

    def go() -> None:
        smp.set_partition(names["model"].module.head, 1)
        model = names["model"]

        @smp.step
        def train_step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            model.backward(cross_entropy(model(inputs), targets))

        train_step(*batch())

    names["go"] = go


def _is_a_configuration(names: Names) -> None:
    from smp_config import ModelParallelParameters
    from support.documents.doc_runs import matching

    (block,) = matching(("pipeline-parallelism.md", '"virtual_stages": 2'), "python")
    ModelParallelParameters.from_mp_parameters(eval(block.code, {})).topology(4)


scene("pipeline-parallelism.md", '"virtual_stages": 2', then=_is_a_configuration)(nothing)


def _scales(names: Names) -> None:
    x, weight = torch.randn(2, 3, dtype=torch.double), torch.randn(3, dtype=torch.double)
    assert torch.autograd.gradcheck(names["Scale"].apply, (x.requires_grad_(), weight.requires_grad_()))


scene("how-it-works/pipeline-parallelism.md", "class Scale", config=DDP, then=_scales)(nothing)
scene("planning.md", "from smp_estimator.planning import plan, suggest", full=True)(nothing)


@scene("preemption.md", "smp.auto_resume", config=DDP)
def _(names: Names) -> None:
    training(names)
    names["train_step"](*batch())


scene("recovery.md", "max_restarts=10")(nothing)
scene("recovery.md", "newest_memory_checkpoint", config=DDP)(training)


@scene(
    "rehearsal.md",
    "from smp_estimator.rehearsal import rehearse",
    full=True,
    instead={'"44"': '"2"', "{...}": '{"ddp": True}', "instance_count=128": "instance_count=1"},
)
def _(names: Names) -> None:
    Path("train.py").write_text(
        "import sys\nimport torch\nimport smdistributed.modelparallel.torch as smp\n\n"
        "smp.init()\nlayers = int(sys.argv[sys.argv.index('--layers') + 1])\n"
        "model = smp.DistributedModel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(layers)]))\n"
        "optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))\n\n\n"
        "@smp.step\ndef train_step(model, x):\n    loss = model(x).mean()\n    model.backward(loss)\n    return loss\n\n\n"
        "for _ in range(4):\n    optimizer.zero_grad()\n    train_step(model, torch.randn(8, 64).to(smp.state.device))\n"
        "    optimizer.step()\n"
    )


_FOUR = {"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2}


@scene(
    "reshape.md",
    "smp.reshape(",
    config=_FOUR,
    ranks=4,
    full=True,
    instead={"step == 1000": "step == 1", "train_step(model, batch)": "train_step(model, *batch)"},
)
def _(names: Names) -> None:
    training(names)


@scene("sharded-data-parallelism.md", "smp.model_creation()", config=DDP | {"delayed_parameter_initialization": True})
def _(names: Names) -> None:
    pass


@scene("sharded-data-parallelism.md", "smp.register_parameter", config=DDP | {"sharded_data_parallel_degree": 1})
def _(names: Names) -> None:
    names["self"] = names["model"]


@scene("tensor-parallelism.md", 'from_pretrained("gpt2")', ranks=2, full=True)
def _(names: Names) -> None:
    gpt2().save_pretrained("gpt2")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.query, self.key, self.value))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp["down"](torch.relu(self.mlp["up"](x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


_TENSOR = {"tensor_parallel_degree": 2, "ddp": True}


def _is_divided(names: Names) -> None:
    smp, x = names["smp"], names["x"]
    with torch.no_grad():
        whole = names["model"](x)
        torch.testing.assert_close(smp.DistributedModel(names["model"])(x), whole)


@scene("tensor-parallelism.md", '"layers.*.attention.query"', config=_TENSOR, ranks=2, full=True, then=_is_divided)
def _(names: Names) -> None:
    torch.manual_seed(0)
    names["model"] = Blocks()
    names["x"] = torch.randn(2, 5, WIDTH)


def _makes_layers(names: Names) -> None:
    smp = names["smp"]
    with smp.tensor_parallelism():
        model = nn.Sequential(names["MyLayer"](WIDTH), names["TheirLayer"](WIDTH))
    smp.DistributedModel(model)(torch.randn(2, 4, WIDTH))


@scene(
    "tensor-parallelism.md",
    "class MyLayer",
    config=_TENSOR,
    ranks=2,
    full=True,
    then=_makes_layers,
    instead={"(nn.Module): ...": "(Wide): ..."},
)
def _(names: Names) -> None:
    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()

    sizes = {"num_attention_heads": 2, "attention_head_size": 4, "intermediate_size": 4 * WIDTH}
    names["Wide"], names["TheirLayer"] = Wide, type("TheirLayer", (Wide,), {})
    names["init_hook"] = lambda width: ((), sizes | {"hidden_size": width})
    names["forward_hook"] = lambda x: (((x, None),), {})
    names["return_hook"] = lambda found: found


@scene("how-it-works/tensor-parallelism.md", "get_hf_gpt2_transformer_layer_hooks", config=_TENSOR, ranks=2, full=True)
def _(names: Names) -> None:
    names["model"] = gpt2()


def _keeps_weights(names: Names) -> None:
    smp = names["smp"]
    with smp.tensor_parallelism():
        gate = names["Gate"](WIDTH)
    kernel, shift, x = gate.kernel.detach(), gate.shift.detach(), torch.randn(2, WIDTH)
    torch.testing.assert_close(smp.DistributedModel(gate)(x), x @ kernel + shift)


@scene(
    "tensor-parallelism.md",
    "class Gate",
    config=_TENSOR,
    ranks=2,
    full=True,
    instead={"(nn.Module): ...": "(Kernel): ..."},
    then=_keeps_weights,
)
def _(names: Names) -> None:
    class Kernel(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(width, width))
            self.shift = nn.Parameter(torch.randn(width))

    torch.manual_seed(0)
    names["Kernel"] = Kernel


@scene("tensor-parallelism.md", "translate_hf_state_dict_to_smdistributed_gpt2", config=_TENSOR, ranks=2, full=True)
def _(names: Names) -> None:
    smp = names["smp"]
    names["pretrained"] = gpt2()
    with smp.tensor_parallelism():
        model = gpt2()
    names["model"] = smp.DistributedModel(model)


scene("timeline.md", "SMP_TIMELINE")(nothing)


def _forget_trackers(names: Names) -> None:
    sys.path.remove(os.getcwd())


@scene("tracking.md", "loggers=", then=_forget_trackers)
def _(names: Names) -> None:
    """Packages that the notebook only looks for; its job's ranks are what imports them."""
    for package in ("tensorboard", "mlflow"):
        Path(package).mkdir()
        Path(package, "__init__.py").touch()
    sys.path.insert(0, os.getcwd())


scene("tracking.md", "smp.log(accuracy", config=DDP)(training)


@scene("tracking.md", "estimator.metric_definitions")
def _(names: Names) -> None:
    names["estimator"] = names["SMPEstimator"](..., instance_type="ml.p4d.24xlarge", instance_count=1)


@scene("trainer.md", 'entry_point="run_clm.py"')
def _(names: Names) -> None:
    Path("run_clm.py").write_text("from transformers import Trainer\n")


scene("how-it-works/training-scripts.md", "model.cuda()", config=DDP)(training)
scene("how-it-works/training-scripts.md", "register_comm_hook", config=DDP, ranks=2, full=True)(training)
scene("how-it-works/training-scripts.md", "p.clamp_", config=DDP)(training)
scene("training-scripts.md", "smp.compile", config=DDP)(nothing)
scene("training-scripts.md", "progress = smp.auto_resume", config=DDP)(training)
scene("training-scripts.md", "first_step = 0", config=DDP)(training)


def _was_stopped(names: Names) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert Path("checkpoints/newest").exists()


@scene(
    "training-scripts.md",
    "signal.SIGTERM",
    config=DDP,
    instead={"...": "os.kill(os.getpid(), signal.SIGTERM)"},
    then=_was_stopped,
)
def _(names: Names) -> None:
    training(names)
    names["first_step"] = 0
