"""Models as shapes, as counts and as modules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smp_config import ConfigError
from smp_estimator.planning import SHAPES, ModelShape, plan
from smp_estimator.planning.known_models import CONFIGURATIONS, HUB_NAMES, named_shape


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("gpt-neox-20b", 20_554_567_680),
        ("llama-7b", 6_738_415_616),
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("meta-llama/Llama-2-13b-hf", 13_015_864_320),
        ("meta-llama/Llama-2-70b-hf", 68_976_648_192),
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
        ("meta-llama/Meta-Llama-3-70B-Instruct", 70_553_706_496),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("meta-llama/Llama-3.1-405B", 405_853_388_800),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("mistralai/Mixtral-8x22B-v0.1", 140_620_634_112),
        ("EleutherAI/gpt-neox-20b", 20_554_567_680),
        ("openai-community/gpt2-xl", 1_557_611_200),
    ],
)
def test_published_counts_come_out_exactly(name: str, published: int) -> None:
    assert named_shape(name).parameters == published


def test_each_known_model_has_a_name_in_the_hub() -> None:
    assert set(CONFIGURATIONS) <= set(HUB_NAMES.values()) <= {*CONFIGURATIONS, *SHAPES}
    assert all(name == name.lower() for name in HUB_NAMES)


def test_a_name_of_the_hub_is_planned_as_its_short_name_or_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("ml.p5.48xlarge", 1, {"ddp": True, "bf16": True, "sharded_data_parallel_degree": 8}, 1)
    short, long = (plan(name, *given, sequence=8192) for name in ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"))
    assert short.total_bytes == long.total_bytes
    assert short.request.workload.fp32_loss, "as Transformers computes it"
    folder = tmp_path / "meta-llama/Llama-3.1-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGURATIONS["llama-3.1-8b"], "num_hidden_layers": 2}))
    monkeypatch.chdir(tmp_path)
    assert plan("meta-llama/Llama-3.1-8B", *given).request.shape.layers == 2


@pytest.mark.parametrize(("name", "size"), [("gpt2-10b", 10), ("gpt2-30b", 30), ("gpt2-60b", 60), ("gpt-neox-65b", 65)])
def test_sizes_of_the_reference_points(name: str, size: float) -> None:
    assert SHAPES[name].parameters / 1e9 == pytest.approx(size, rel=0.03)
    assert SHAPES[name].source != "given"


@pytest.mark.parametrize("count", [50e6, 124e6, 1.5e9, 6.7e9, 13e9, 20e9, 65e9, 175e9])
def test_a_shape_for_a_count(count: float) -> None:
    shape = ModelShape.from_parameter_count(count)
    assert shape.parameters == pytest.approx(count, rel=0.06)
    assert shape.hidden % shape.heads == 0


def test_wrong_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gpt-neox-20b'"):
        plan("gpt-neo-20b", "ml.p4d.24xlarge")
    with pytest.raises(ConfigError, match="path of its config.json, or its size, '8b'; known are gpt2"):
        plan("some-lab/Model-8B", "ml.p4d.24xlarge")
    with pytest.raises(ConfigError, match="path of its config.json, or its size, '0.6b'; known are gpt2"):
        plan("Qwen/Qwen3-0.6B-Base", "ml.p4d.24xlarge")
    with pytest.raises(ConfigError, match="path of its config.json; known are gpt2"):
        plan("some-lab/model", "ml.p4d.24xlarge")
    with pytest.raises(ConfigError, match="did you mean 'llama-3.1-8b'"):
        plan("someone/llama-3.1-8bb", "ml.p4d.24xlarge")
    with pytest.raises(ConfigError, match="20e9"):
        plan(20, "ml.p4d.24xlarge")
    with pytest.raises(ConfigError, match="word embedding alone"):
        plan(2e6, "ml.p4d.24xlarge")
    with pytest.raises(ConfigError, match="use heads="):
        ModelShape(2, 100, 3, 10, 10)
    with pytest.raises(ConfigError, match="layers is 0"):
        ModelShape(0, 100, 2, 10, 10)
    with pytest.raises(ConfigError, match="give an nn.Module"):
        plan(object(), "ml.p4d.24xlarge")
    with pytest.raises(ConfigError, match="has no parameters"):
        plan(SimpleNamespace(named_parameters=list), "ml.p4d.24xlarge")


def test_another_sequence_keeps_the_weights() -> None:
    shape = SHAPES["gpt2"]
    longer = shape.with_sequence(4096)
    assert longer.parameters == shape.parameters
    assert longer.sequence == 4096


def _gpt(torch: Any, tied: bool, config: Any = None) -> Any:
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(64), nn.LayerNorm(64)
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
            self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    class GPT(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(1000, 64), nn.Embedding(32, 64)
            self.blocks = nn.ModuleList([Block() for _ in range(3)])
            self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 1000, bias=False)
            if tied:
                self.head.weight = self.tokens.weight
            if config is not None:
                self.config = config

    with torch.device("meta"):
        return GPT()


@pytest.mark.parametrize("tied", [True, False])
def test_a_module_on_the_meta_device(tied: bool) -> None:
    torch = pytest.importorskip("torch")
    shape = ModelShape.from_module(_gpt(torch, tied), sequence=32, heads=4)
    made = ModelShape(3, 64, 4, 1000, 32, tied_embeddings=tied)
    assert (shape.layers, shape.hidden, shape.width, shape.vocabulary) == (3, 64, 256, 1000)
    assert shape.tied_embeddings == tied
    assert shape.parameters == made.parameters
    arguments: dict[str, Any] = {"instance_type": "ml.p4d.24xlarge", "parameters": {"ddp": True}, "batch": 4}
    assert plan(shape, **arguments).worst.kinds == plan(made, **arguments).worst.kinds
    split = {"ddp": True, "tensor_parallel_degree": 4, "prescaled_batch": True}
    # Biases of divided matrices are not told apart from others in a module, so it counts them whole.
    whole, exact = (plan(s, "ml.p4d.24xlarge", 1, split, 4).worst.elements for s in (shape, made))
    assert 0 <= whole - exact <= 3 * (192 + 256)


def test_a_module_with_a_config() -> None:
    torch = pytest.importorskip("torch")
    config = SimpleNamespace(n_embd=64, n_head=8, vocab_size=1000, n_positions=32, n_inner=None)
    shape = ModelShape.from_module(_gpt(torch, True, config))
    assert (shape.heads, shape.sequence, shape.vocabulary, shape.width) == (8, 32, 1000, 256)


def test_positions_before_tokens_and_a_gated_mlp() -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)
            self.gate, self.up = nn.Linear(64, 256, bias=False), nn.Linear(64, 256, bias=False)
            self.down = nn.Linear(256, 64, bias=False)

    with torch.device("meta"):
        model = nn.Module()
        model.positions, model.tokens = nn.Embedding(32, 64), nn.Embedding(1000, 64)
        model.blocks = nn.ModuleList([Block(), Block()])
    shape = ModelShape.from_module(model, sequence=32)
    assert shape.gated
    assert [w.elements for w in shape.tensors() if w.embedding] == [64_000]
    assert (shape.vocabulary, shape.layers, shape.width) == (1000, 2, 256)
    with torch.device("meta"):
        plain = ModelShape.from_module(_gpt(torch, True))
    assert not plain.gated


@pytest.mark.parametrize(
    ("positions", "head"),
    [("positions", False), ("positions", True), ("wpe", False), ("pos_emb", False), ("where", True)],
)
def test_more_positions_than_words(positions: str, head: bool) -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn
    with torch.device("meta"):
        model = nn.Module()
        model.words = nn.Embedding(256, 64)
        setattr(model, positions, nn.Embedding(1024, 64))
        model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(2)])
        if head:
            model.head = nn.Linear(64, 256, bias=False)
    shape = ModelShape.from_module(model)
    assert shape.vocabulary == 256
    assert [w.elements for w in shape.tensors() if w.embedding] == [256 * 64] * (2 if head else 1)
    assert shape.tied_embeddings is not head
    assert shape.sequence == (1 if positions == "where" else 1024)
    unknown = any("a sample counts as one token" in note for note in plan(shape, "ml.p4d.24xlarge").notes)
    assert unknown is (positions == "where")


def test_as_many_positions_as_words_are_no_words() -> None:
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        model = _gpt(torch, tied=False)
        model.positions = torch.nn.Embedding(1000, 64)
    shape = ModelShape.from_module(model)
    assert [(w.layer, w.elements) for w in shape.tensors() if w.embedding] == [(-1, 64_000), (None, 64_000)]
    assert (shape.vocabulary, shape.sequence) == (1000, 1000)


def test_a_module_without_layers_is_planned_without_activations() -> None:
    torch = pytest.importorskip("torch")
    made = plan(torch.nn.Linear(8, 8, bias=False).to("meta"), "ml.p4d.24xlarge", 1, {"ddp": True})
    assert made.worst.activations.total == 0
    assert made.worst.state == 16 * 64
    assert any("activations are not counted" in note for note in made.notes)


def test_planning_never_imports_torch_or_the_sdk() -> None:
    code = (
        "import sys; from smp_estimator import planning; str(planning.plan('gpt2', 'ml.p4d.24xlarge')); "
        "print([m for m in ('torch', 'sagemaker', 'boto3', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
