"""Scopes, registration and replacement: what is distributed, what is left alone, and that results stay right."""

from __future__ import annotations

import pytest
import torch
from support.logs import heard
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError

CONFIG = {"tensor_parallel_degree": 2, "ddp": True}


class Block(nn.Module):
    """A transformer layer of a script's own, with an interface of its own."""

    def __init__(self, width, heads=4):
        super().__init__()
        from support.models.plain_transformer import Layer

        self.layer = Layer(
            num_attention_heads=heads, attention_head_size=width // 4, hidden_size=width, intermediate_size=2 * width
        )
        self.inner = nn.Linear(width, width)  # nested in a supported module

    def forward(self, hidden, mask=None):
        return {"hidden": self.layer((hidden, mask))[0]}


def _block_init(width, heads=4):
    quiet = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return (heads, width // 4, width, 2 * width), quiet


def _block_forward(hidden, mask=None):
    return ((hidden, mask),), {}


def _block_return(result):
    return {"hidden": result[0]}


class Net(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        with smp.tensor_parallelism():
            self.first = nn.Linear(8, 16)
            with smp.tensor_parallelism(enabled=False):
                self.plain = nn.Linear(16, 16)
            self.block = Block(16, heads)
            self.odd = nn.Linear(15, 8)
            self.tied = nn.Linear(16, 11, bias=False)
            self.embedding = nn.Embedding(11, 16)
        self.embedding.weight = self.tied.weight

    def forward(self, x):
        x = self.plain(self.first(x))
        x = self.block(hidden=x)["hidden"]
        return self.tied(x) + self.odd(x[..., :15]).sum()


def _block_state(state):
    """What is beside the layer is not distributed, and not used."""
    return {name.removeprefix("layer."): value for name, value in state.items() if name.startswith("layer.")}


def _register():
    hooks = (_block_init, _block_forward, _block_return, _block_state)
    smp.tp_register_with_module(Block, smp.nn.DistributedTransformerLayer, *hooks)


def _replaced_and_left():
    from support.training.closeness import close

    from smdistributed.modelparallel.torch.utils import get_distribution_axis

    _register()
    torch.manual_seed(0)
    alone = Net()
    smp.set_tensor_parallelism(alone, False)
    torch.manual_seed(0 if smp.tp_rank() == 0 else 7)  # the weights of a group's first rank count
    model, warnings = heard(lambda: smp.DistributedModel(Net()))
    kinds = {name: type(part).__name__ for name, part in model.module.named_children()}
    generator = torch.Generator().manual_seed(smp.tp_rank())
    x = torch.randn(2, 5, 8, generator=generator)
    close(model(x), alone(x))
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    distributed = [name for name, p in model.named_parameters() if model.is_distributed_parameter(p)]
    for name, axis in (("first.weight", 1), ("block.attention.query.weight", 0), ("plain.weight", None)):
        assert get_distribution_axis(dict(model.named_parameters())[name]) == axis
    return kinds, warnings, shapes, distributed, [n for n, _ in model.scaled_batch_reducer_named_parameters()]


def test_outermost_supported_modules_are_replaced_and_others_left_alone(ranks):
    results = ranks(_replaced_and_left, 2, config=CONFIG)
    kinds, warnings, shapes, distributed, scaled = results[0]
    assert kinds == {
        "first": "DistributedLinear",
        "plain": "Linear",
        "block": "DistributedTransformerLayer",
        "odd": "Linear",
        "tied": "Linear",
        "embedding": "Embedding",
    }
    assert len(warnings) == 3, warnings
    assert any("block (Block) is distributed as a whole: " in w and "× Linear" in w for w in warnings)
    assert any("odd (Linear) is not distributed: in_features is 15" in w for w in warnings)
    assert any("tied (Linear) is not distributed: it shares a weight" in w for w in warnings)
    assert shapes["first.weight"] == [16, 4]
    assert shapes["first.bias"] == [16]
    assert shapes["block.attention.query.weight"] == [8, 16]
    assert shapes["plain.weight"] == [16, 16]
    assert set(distributed) >= {"first.weight", "block.attention.dense.weight", "block.output.dense1.bias"}
    assert "first.bias" not in distributed
    assert "plain.weight" not in scaled
    assert "block.output.dense2.weight" in scaled
    assert results[1][1] == []  # one warning, not one per rank


def _indivisible():
    from support.training.closeness import close

    _register()
    torch.manual_seed(0)
    alone = Block(16, heads=3)
    model, warnings = heard(lambda: smp.DistributedModel(nn.Sequential(_made(lambda: Block(16, heads=3)))))
    model.load_state_dict({f"0.{name}": value for name, value in alone.state_dict().items()})
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(smp.tp_rank()))  # a batch of its own on each rank
    found, expected = model(x)["hidden"], alone(x)["hidden"]
    close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    gradients = [[p.grad for p in part.parameters() if p.grad is not None] for part in (model, alone)]
    return type(model.module[0]).__name__, warnings, next(list(p.shape) for p in model.parameters()), gradients


def _made(make, **settings):
    with smp.tensor_parallelism(**settings):
        return make()


def test_heads_that_do_not_divide_are_left_alone(ranks):
    results = ranks(_indivisible, 2, config=CONFIG)
    kind, warnings, shape, _ = results[0]
    assert kind == "Block"
    assert len(warnings) == 2
    assert "no module of the Sequential is distributed" in warnings[1]
    assert "num_attention_heads is 3, which the tensor_parallel_degree 2 does not divide" in warnings[0]
    assert shape == [12, 16]
    found = results[0][3][0]
    both = [(a + b) / 2 for a, b in zip(results[0][3][1], results[1][3][1], strict=True)]
    assert len(found) == len(both) > 0
    for mine, mean in zip(found, both, strict=True):  # averaged over the ranks, as of any layer that is not distributed
        torch.testing.assert_close(mine, mean, atol=1e-5, rtol=1e-5)


def test_one_rank_is_enough_when_a_scope_asks(solo):
    solo({})
    model = smp.DistributedModel(_made(lambda: nn.Sequential(nn.Linear(4, 4))))
    assert type(model.module[0]).__name__ == "DistributedLinear"


def test_marks_after_creation(solo):
    solo({})
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    smp.set_tensor_parallelism(model, True)
    smp.set_tensor_parallelism(model[1][0], False)
    wrapped = smp.DistributedModel(model).module
    kinds = [type(part).__name__ for part in (wrapped[0], wrapped[1][0], wrapped[1][1])]
    assert kinds == ["DistributedLinear", "Linear", "DistributedLinear"]


def test_keywords_of_a_scope_override_the_hooks(solo):
    solo({})
    _register()
    with pytest.raises(SMPUserError, match=r"output.dense1.weight is \[32, 16\], not \[64, 16\].* keep_weights=False"):
        smp.DistributedModel(_made(lambda: Block(16), intermediate_size=64))
    options = {"attention_in_fp32": True, "intermediate_size": 64, "keep_weights": False}
    model = smp.DistributedModel(_made(lambda: Block(16), **options))
    assert model.module.settings.attention_in_fp32
    assert model.module.output.dense1.weight.shape == (64, 16)


def test_a_module_used_twice_is_replaced_once(solo):
    solo({})
    shared = _made(lambda: nn.Linear(4, 4))
    wrapped = smp.DistributedModel(nn.Sequential(shared, nn.ReLU(), shared)).module
    assert wrapped[0] is wrapped[2]
    assert type(wrapped[0]).__name__ == "DistributedLinear"


def test_wrong_keywords(solo):
    solo({})
    with pytest.raises(SMPUserError, match="did you mean 'fused_softmax'"), smp.tensor_parallelism(fused_softmx=True):
        pass
    with (
        pytest.raises(SMPUserError, match="it is a switch: use True or False"),
        smp.tensor_parallelism(use_alibi="yes"),
    ):
        pass
    with smp.model_creation(tensor_parallelism=False, zero_init=True, fused_dropout=False, flash_attention=True):
        assert type(nn.Linear(2, 2)) is nn.Linear


def test_registering_what_cannot_be(solo):
    solo({})
    with pytest.raises(SMPUserError, match="must be a subclass of DistributedModule"):
        smp.tp_register_with_module(Block, nn.Linear)
    with pytest.raises(SMPUserError, match="pass a function"):
        smp.tp_register(smp.nn.DistributedLinear, init_hook=3)(Block)


def test_the_decorator(solo):
    solo({})

    @smp.tp_register(smp.nn.DistributedLinear, init_hook=lambda width: ((width, width), {"bias": False}))
    class Square(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(width))

        def forward(self, x):
            return x @ self.weight.t()

    model = smp.DistributedModel(_made(lambda: Square(4)))
    assert type(model.module).__name__ == "DistributedLinear"
    assert model.module.bias is None
    assert torch.equal(model.module.weight, torch.eye(4))  # names and shapes are the same


def test_signatures_are_those_of_the_public_page():
    import inspect

    expected = {
        "DistributedLinear": "in_features out_features",
        "DistributedTransformerLMHead": """num_layers=12 num_attention_heads=32 attention_head_size=32 hidden_size=1024
            intermediate_size=4096 vocab_size=30522 num_positions=1024 attention_dropout_prob=0.1 hidden_dropout_prob=0.1
            activation='gelu' layernorm_epsilon=1e-05 num_token_types=0 causal_mask_size=None add_cross_attention=False
            add_lm_head=True initializer_range=0.02 use_normal_initialization=False pre_layernorm=False
            post_layernorm=True""",
        "DistributedTransformer": """num_layers=12 num_attention_heads=32 attention_head_size=32 hidden_size=1024
            intermediate_size=4096 attention_dropout_prob=0.1 hidden_dropout_prob=0.1 activation='gelu'
            layernorm_epsilon=1e-05 initializer_range=0.02 use_normal_initialization=False causal_mask_size=None
            add_cross_attention=False pre_layernorm=False post_layernorm=True""",
        "DistributedTransformerLayer": """num_attention_heads=32 attention_head_size=32 hidden_size=1024
            intermediate_size=4096 attention_dropout_prob=0.1 hidden_dropout_prob=0.1 activation='gelu'
            layernorm_epsilon=1e-05 initializer_range=0.02 use_normal_initialization=False causal_mask_size=None
            add_cross_attention=False pre_layernorm=False post_layernorm=True""",
        "DistributedAttentionLayer": """num_attention_heads=32 attention_head_size=32 hidden_size=1024
            attention_dropout_prob=0.1 hidden_dropout_prob=0.1 layernorm_epsilon=1e-05 initializer_range=0.02
            use_normal_initialization=False cross_attention=False causal_mask_size=None pre_layernorm=False
            post_layernorm=True""",
        "DistributedTransformerOutputLayer": """hidden_size=1024 intermediate_size=4096 hidden_dropout_prob=0.1
            activation='gelu' layernorm_epsilon=1e-05 initializer_range=0.02 use_normal_initialization=False
            pre_layernorm=False post_layernorm=True fp32_residual_addition=False""",
        "DistributedEmbedding": """num_embeddings embedding_dim padding_idx=None max_norm=None norm_type=2.0
            scale_grad_by_freq=False sparse=False _weight=None initializer_range=0.02 _skip_allgather=False
            _skip_scatter_and_merge=False""",
        "FlashAttentionLayer": """attention_dropout_prob=0.1 attention_head_size=None scale_attention_scores=True
            scale_attn_by_layer_idx=False layer_idx=None scale=None triton_flash_attention=False use_alibi=False""",
    }
    for name, arguments in expected.items():
        documented = arguments.split()
        ours = inspect.signature(getattr(smp.nn, name)).parameters.values()
        found = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in ours]
        assert found[: len(documented)] == documented, name


class Reading(nn.Module):
    """A head that puts its table together from the embeddings and what lies beside them, as MobileBERT's does."""

    def __init__(self):
        super().__init__()
        self.decoder, self.beside = nn.Linear(16, 11), nn.Linear(11, 8, bias=False)

    def forward(self, x):
        return x @ torch.cat([self.decoder.weight.t(), self.beside.weight]) + self.decoder.bias


def _tables():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 24), Reading())
    net[2].decoder.weight = net[0].weight
    return net


def _with_tables():
    from support.training.closeness import close

    alone, net = _tables(), _tables()
    smp.set_tensor_parallelism(net)
    model, warnings = heard(lambda: smp.DistributedModel(net))
    ids = torch.arange(10).view(2, 5)
    close(model(ids), alone(ids))
    return type(net[1]).__name__, type(net[2].beside).__name__, warnings


def test_a_linear_map_whose_weight_others_use_stays_whole(ranks):
    for number, (called, read, warnings) in enumerate(ranks(_with_tables, 2, config=CONFIG)):
        assert (called, read) == ("DistributedLinear", "Linear")
        assert sum("2.beside (Linear) is not distributed: its weight is used by the code" in w for w in warnings) == (
            number == 0
        )
