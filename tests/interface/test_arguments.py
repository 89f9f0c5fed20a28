"""No setting and no argument is accepted without effect and without a word.

A setting or argument has an effect if the code reads it. One that it does not read must be listed here: with a call that
gives it, which then has to warn, once; or as one whose documentation says why there is nothing to do.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import logging
import pkgutil
import textwrap
from pathlib import Path

import pytest
import torch
from support.import_graph import nodes
from torch import nn

import smdistributed
import smdistributed.modelparallel.torch as smp
from smp_config import ModelParallelParameters
from smp_runtime.nn.settings import WITHOUT_EFFECT, LayerSettings

CONTAINER = Path(__file__).parents[2] / "container"
#: What the configuration is called where it is read.
CONFIGURATIONS = {"cfg", "config", "options", "parameters"}

# -- settings ----------------------------------------------------------------------------------------------------------

#: Settings that nothing reads, and values that must be warned about, in a configuration where they might matter.
WARNED_SETTINGS = {
    "contiguous": {"contiguous": False},
    "static_mode": {"static_mode": True},
    "match_weights": {"_match_weights": True},
}
#: Settings with one allowed value: another is refused.
REFUSED_SETTINGS = {"horovod": {"horovod": True}}
#: Read by a method of the configuration, which the runtime calls.
BY_METHOD = {"placement_strategy": "topology", "tensor_parallel_degree": "topology"}


@functools.cache
def _attributes_read():
    """Name and owner's name of all attributes that the runtime reads."""
    found = set()
    for path in [*(CONTAINER / "smp_runtime").rglob("*.py"), *(CONTAINER / "smp_tools").rglob("*.py")]:
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                found.add((node.attr, owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")))
    return found


def _read_in_the_runtime():
    return {name for name, owner in _attributes_read() if owner in CONFIGURATIONS}


def test_every_setting_is_read_or_warned_about():
    read = _read_in_the_runtime()
    assert all(method in read for method in BY_METHOD.values())
    silent = set(ModelParallelParameters.model_fields) - read - BY_METHOD.keys()
    assert silent == WARNED_SETTINGS.keys() | REFUSED_SETTINGS.keys()


@pytest.mark.parametrize("name", WARNED_SETTINGS)
def test_a_setting_without_effect_is_warned_about_once(name):
    usual = ModelParallelParameters.from_mp_parameters({"partitions": 2}).warnings()
    said = ModelParallelParameters.from_mp_parameters({"partitions": 2, **WARNED_SETTINGS[name]}).warnings()
    (new,) = [sentence for sentence in said if sentence not in usual]
    assert name in new


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_a_setting_that_cannot_be_served_is_refused(name):
    with pytest.raises(ValueError, match=name):
        ModelParallelParameters.from_mp_parameters(REFUSED_SETTINGS[name])


def test_settings_that_slow_a_job_down_are_warned_about():
    said = ModelParallelParameters.from_mp_parameters({"partitions": 2, "fast_mode": False}).warnings()
    assert any("fast_mode is false" in sentence for sentence in said)
    assert not ModelParallelParameters.from_mp_parameters({"fast_mode": False}).warnings()


@pytest.mark.parametrize("settings", [{}, {"partitions": 2, "fast_mode": False}])
def test_a_step_program_that_is_ignored_is_warned_about(settings):
    said = ModelParallelParameters.from_mp_parameters({"step_program": True, **settings}).warnings()
    assert any("step_program ignored" in sentence for sentence in said)
    assert not ModelParallelParameters.from_mp_parameters({"step_program": True, "partitions": 2}).warnings()


# -- arguments ---------------------------------------------------------------------------------------------------------


def _checkpointed():
    smp.save({}, "x", partial=False)
    return smp.load("x", partial=False, back_compat=True)


def _layer(**options):
    sizes = {"num_attention_heads": 2, "attention_head_size": 2, "hidden_size": 4, "intermediate_size": 4}
    return smp.nn.DistributedTransformerLayer(**sizes, **options)


#: By function and argument, a call that must warn once, naming the argument.
WARNED = {
    "load.back_compat": _checkpointed,
    "FusedLayerNorm.__init__.memory_efficient": lambda: smp.nn.FusedLayerNorm(4, memory_efficient=True),
    "FlashAttentionLayer.__init__.triton_flash_attention": lambda: smp.nn.FlashAttentionLayer(
        attention_head_size=4, triton_flash_attention=True
    ),
    "DistributedEmbedding.__init__.norm_type": lambda: smp.nn.DistributedEmbedding(4, 4, norm_type=1.0),
}
#: What their documentation says has no effect, because what is asked for holds in any case.
STATED = {
    "DistributedModel.__init__.find_unused_parameters",
    "WrappedModule.cuda.device",
    "SavedOptimizer.load_state_dict.gather_if_shard",
    "checkpoint_sequential.pack_args_as_tuple",
    "from_hf.max_seq_len",
    "to_hf.max_seq_len",
    "verify.args",
    "verify.kwargs",
    "dump_model.args",
    "dump_model.kwargs",
}


def _public_objects():
    found = {}
    for module in pkgutil.walk_packages(smdistributed.__path__, "smdistributed."):
        if ".lightning" in module.name and importlib.util.find_spec("lightning") is None:
            continue
        loaded = importlib.import_module(module.name)
        for name in getattr(loaded, "__all__", ()):
            if not inspect.ismodule(value := getattr(loaded, name)):
                found[id(value)] = value
    return list(found.values())


def _is_ours(value):
    return value.__module__.startswith(("smdistributed", "smp_integrations", "smp_runtime", "smp_tools"))


@functools.cache
def _functions():
    """Every function that a script can call, once, by a short name: with the constructors and methods of public classes."""
    seen = {}
    for value in _public_objects():
        if inspect.isclass(value):
            for base in filter(_is_ours, value.__mro__):
                for name, entry in vars(base).items():
                    method = inspect.unwrap(getattr(entry, "__func__", entry))
                    if inspect.isfunction(method) and (not name.startswith("_") or name == "__init__"):
                        seen[method.__code__] = f"{base.__qualname__}.{name}", method
        elif callable(value):
            inner = inspect.unwrap(value)
            if inspect.isfunction(inner) and "function" in inner.__code__.co_freevars:  # asks for the session first
                inner = inspect.getclosurevars(inner).nonlocals["function"]
            if inspect.isfunction(inner) and _is_ours(inner):
                seen[inner.__code__] = inner.__name__, inner
    return list(seen.values())


def _definition(function):
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def _hands_on_locals(definition):
    return any(isinstance(n, ast.Call) and ast.unparse(n.func) == "locals" for n in ast.walk(definition))


def _is_kept_in_vain(statement, known):
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Name)
        and isinstance(target := statement.targets[0], ast.Attribute)
        and target.attr not in known
    )


def _unread(definition):
    if _hands_on_locals(definition):
        return set()  # LayerSettings, whose fields are looked at below
    # What is only kept under a name that nothing reads has no effect either.
    known = {name for name, _ in _attributes_read()}
    statements = [statement for statement in definition.body if not _is_kept_in_vain(statement, known)]
    nodes = [node for statement in statements for node in ast.walk(statement)]
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    taken = definition.args
    arguments = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, *filter(None, (taken.vararg, taken.kwarg))]
    return {argument.arg for argument in arguments} - read - {"self", "cls"}


def test_every_argument_is_read_or_stated():
    functions = _functions()
    assert len(functions) > 150
    unread = {f"{name}.{argument}" for name, function in functions for argument in _unread(_definition(function))}
    assert unread == STATED


@pytest.mark.parametrize("name", sorted(STATED))
def test_what_has_no_effect_is_said_in_the_documentation(name):
    title, _, argument = name.rpartition(".")
    documentation = []
    for found, function in _functions():
        if found == title:
            documentation.append(inspect.getdoc(function) or "")
            if title.endswith(".__init__"):
                kinds = [v for v in _public_objects() if inspect.isclass(v) and vars(v).get("__init__") is function]
                documentation += [kind.__doc__ or "" for kind in kinds]
    assert any(documentation)
    if argument not in ("args", "kwargs"):
        assert any(argument in text for text in documentation)


@pytest.fixture
def told(solo, caplog, tmp_path, monkeypatch):
    """What a call has warned of."""
    monkeypatch.chdir(tmp_path)
    solo({})

    def calling(call):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="smp"):
            call()
            call()
        return [record.getMessage() for record in caplog.records]

    logger = logging.getLogger("smp")
    before, logger.propagate = logger.propagate, True
    yield calling
    logger.propagate = before


@pytest.mark.parametrize("name", WARNED)
def test_an_argument_without_effect_is_warned_about_once(told, name):
    (said,) = told(WARNED[name])
    assert name.rpartition(".")[2] in said
    assert "ignored" in said


# -- settings of layers, and keywords of scopes ------------------------------------------------------------------------


def _read_of_settings():
    found = set()
    for path in (CONTAINER / "smp_runtime" / "nn").glob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("settings", "self.settings"):
                found.add(node.attr)
    return found


def test_every_setting_of_a_layer_is_read_or_warned_about():
    for kind in (smp.nn.DistributedTransformerLayer, smp.nn.DistributedAttentionLayer):
        definition = _definition(kind.__init__)
        own = {argument.arg for argument in definition.args.args} - {"self", "cross_attention"}
        assert own <= set(LayerSettings.names())
    # Arguments that the constructors use themselves.
    used = {
        node.id
        for path in (CONTAINER / "smp_runtime" / "nn").glob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    silent = set(LayerSettings.names()) - _read_of_settings() - used
    assert silent == WITHOUT_EFFECT.keys() & set(LayerSettings.names())


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_switch_without_effect_is_warned_about_once(told, name):
    usual = WITHOUT_EFFECT[name][0]

    def both():
        with smp.tensor_parallelism(**{name: not usual}):
            nn.Linear(2, 2)
        smp.set_tensor_parallelism(nn.Linear(2, 2), **{name: not usual})
        if name in LayerSettings.names():
            _layer(**{name: not usual})

    (said,) = told(both)
    assert f"{name}={not usual} ignored" in said

    def neither():
        with smp.tensor_parallelism(**{name: usual}), smp.tensor_parallelism(enabled=False, **{name: not usual}):
            nn.Linear(2, 2)

    assert told(neither) == []


# -- and what acts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [False, True])
def test_attentions_are_checkpointed(solo, parallel):
    """Backward computes the attention again, and nothing else."""
    solo({"checkpoint_attentions": True})
    layer = _layer(pre_layernorm=True, post_layernorm=False, parallel_attn_output=parallel, hidden_dropout_prob=0.5)
    calls = {"attention": 0, "output": 0}
    for name in calls:
        half = getattr(layer, name)
        change = half.change

        def counted(*args, change=change, name=name):
            calls[name] += 1
            return change(*args)

        half.change = counted
    x = torch.randn(2, 3, 4, requires_grad=True)
    layer((x, None))[0].sum().backward()
    assert calls == {"attention": 2, "output": 1}


def test_attentions_that_cannot_be_checkpointed_are_told(told):
    smp.shutdown()
    smp.init({"checkpoint_attentions": True})
    made = []
    (said,) = told(lambda: made.append(smp.DistributedModel(nn.Linear(2, 2))))
    assert "checkpoint_attentions ignored: the model has no distributed attention" in said
    assert not [each for each in told(lambda: made.append(smp.DistributedModel(_layer()))) if "ignored" in each]


def test_alibi_of_flash_attention_without_a_mask(solo):
    solo({})
    torch.manual_seed(0)
    qkv = torch.randn(2, 5, 3, 4, 8)
    layer = smp.nn.FlashAttentionLayer(attention_head_size=8, use_alibi=True).eval()
    slopes = 2.0 ** -(torch.arange(1, 5) * 2.0)
    mask = slopes[None, :, None, None] * torch.arange(-4.0, 1.0)
    torch.testing.assert_close(layer(qkv, causal=True), layer(qkv, mask, causal=True))
    plain = smp.nn.FlashAttentionLayer(attention_head_size=8).eval()
    assert not torch.allclose(layer(qkv, causal=True), plain(qkv, causal=True))


def test_gradients_become_zero_or_none(solo):
    solo({})
    model = smp.DistributedModel(nn.Linear(2, 2))
    for kept in (False, True):
        inner = smp.optimizers.FusedAdam(model.parameters(), set_grad_none=not kept)
        for optimizer in (inner, smp.DistributedOptimizer(inner)):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.zero_grad()
            assert [p.grad is not None for p in model.parameters()] == [kept, kept]


def test_a_device_for_a_distributed_linear(solo):
    solo({})
    assert smp.nn.DistributedLinear(2, 2, device="cpu").weight.device.type == "cpu"
    with pytest.raises(ValueError, match=r"smp\.delay_param_initialization"):
        smp.nn.DistributedLinear(2, 2, device="meta")


def test_buffers_of_distributed_modules(solo):
    class Scaled(smp.nn.DistributedModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(2))
            self.register_buffer("own", torch.ones(2))
            self.reductions["own"] = smp.DP_GROUP.value

    class Split(Scaled):
        def __init__(self):
            super().__init__()
            linear = smp.nn.DistributedLinear(2, 2)
            self.tensor_slices["scale"] = linear.tensor_slices["weight"]

    solo({})
    model = smp.DistributedModel(nn.Sequential(Scaled(), Split(), nn.BatchNorm1d(2)))
    scaled, split, norm = model.module
    assert [model.is_scaled_batch_buffer(b) for b in (scaled.scale, scaled.own, norm.running_mean)] == [1, 0, 0]
    assert [model.is_distributed_buffer(b) for b in (split.scale, split.own, scaled.scale)] == [1, 0, 0]


def test_distributed_attention_has_a_flash_attention_layer(solo):
    """Public tests look for one; it computes, and is in no state."""
    solo({})
    layer = _layer(attention_dropout_prob=0.0, hidden_dropout_prob=0.0, add_cross_attention=True)
    found = [part for part in layer.modules() if isinstance(part, smp.nn.FlashAttentionLayer)]
    assert len(found) == 2
    assert not any("flashmod" in name for name in layer.state_dict())
    x, seen = torch.randn(1, 2, 4), []
    found[0].weigh = lambda *args: seen.append(args) or torch.zeros(1, 2, 2, 2)
    layer((x, x, None, None))
    assert len(seen) == 1
