"""What a module has when it is replaced, its distributed form has: the first loss is plain PyTorch's."""

from __future__ import annotations

import pytest
import torch
from support.logs import heard
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError

TOPOLOGIES = {
    "tp1": (1, {}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "tp2 prescaled": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": "speed"}),
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "pp2 tp2": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 2}),
    "tp2 in shards": (4, {"tensor_parallel_degree": 2, "prescaled_batch": True, "sharded_data_parallel_degree": 2,
                          "sdp_param_persistence_threshold": 20}),
}  # fmt: skip


class Own(nn.Module):
    """A model of a script's own: its own initialisation, a tied weight inside a plain model, a class with other names."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8, padding_idx=0)
        self.positions = nn.Embedding(4, 8)
        self.tied = nn.Linear(8, 12, bias=False)
        self.tied.weight = self.embedding.weight
        self.shared = nn.Linear(8, 8)
        self.again = self.shared
        self.norm = nn.BatchNorm1d(4)
        self.gate = Gate(8)
        self.head = nn.Linear(8, 4)
        nn.init.orthogonal_(self.shared.weight)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, 0.25)

    def forward(self, ids):
        hidden = self.embedding(ids) + self.positions(torch.arange(4, device=ids.device).expand_as(ids))
        hidden = hidden + self.again(torch.tanh(self.shared(hidden)))
        hidden = self.gate(self.norm(hidden))
        return self.head(hidden).square().mean() + self.tied(hidden).logsumexp(-1).mean()


class Gate(nn.Module):
    """Distributed as a linear map, whose weight it calls otherwise and keeps transposed."""

    def __init__(self, width):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(width, width))
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x @ self.kernel + self.shift


def _kernel_to_weight(state):
    return {"weight": state["kernel"].t(), "bias": state["shift"]}


def _hugging_face(name):
    model = _fresh(name)
    with torch.no_grad():  # what a checkpoint would have brought
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _fresh(name):
    import transformers as hf

    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 43, "max_position_embeddings": 16}
    wide = {"hidden_size": 32, "intermediate_size": 48, **sizes}
    quiet = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    make = {
        "gpt2": lambda: hf.GPT2Config(
            n_embd=32, n_head=4, n_layer=2, n_positions=16, vocab_size=43, bos_token_id=1, eos_token_id=1, **quiet
        ),
        "gptj": lambda: hf.GPTJConfig(
            n_embd=32, n_head=4, n_layer=2, n_positions=16, vocab_size=43, rotary_dim=4, **quiet
        ),
        "gptneo": lambda: hf.GPTNeoConfig(
            hidden_size=32, num_heads=4, num_layers=2, attention_types=[[["global", "local"], 1]], vocab_size=43,
            max_position_embeddings=16, attention_dropout=0.0, resid_dropout=0.0, embed_dropout=0.0,
        ),
        "gptneox": lambda: hf.GPTNeoXConfig(**wide, rotary_pct=0.5),
        "llama": lambda: hf.LlamaConfig(**wide, num_key_value_heads=2),
        "bert": lambda: hf.BertConfig(**wide, **still),
        "roberta": lambda: hf.RobertaConfig(**{**wide, "max_position_embeddings": 18}, **still),
    }  # fmt: skip
    auto = hf.AutoModelForMaskedLM if "bert" in name else hf.AutoModelForCausalLM
    return auto.from_config(make[name](), attn_implementation="eager")


FAMILIES = ("gpt2", "gptj", "gptneo", "gptneox", "llama", "bert", "roberta")


def _model(name):
    return Own() if name == "own" else _hugging_face(name)


def _loss(model, ids):
    return model(ids) if ids.shape[1] == 4 else model(input_ids=ids, labels=ids).loss


def _first_losses(names):
    """Of each model: plain PyTorch's first loss, and the wrapped model's, of this rank's batch."""
    smp.tp_register_with_module(Gate, smp.nn.DistributedLinear, lambda width: ((width, width), {}), None, None,
                                _kernel_to_weight)  # fmt: skip
    losses = {}
    for name in names:
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(3, 12, (4, 4 if name == "own" else 8), generator=generator)
        torch.manual_seed(11)
        expected = float(_loss(_model(name), ids).detach())
        torch.manual_seed(11 + smp.tp_rank())  # the weights of a group's first rank count
        with smp.model_creation(tensor_parallelism=True, distribute_embedding=name == "own"):
            module = _model(name)
        model = smp.DistributedModel(module)

        @smp.step
        def step(ids, model=model):
            loss = _loss(model, ids)
            model.backward(loss)
            return loss

        losses[name] = expected, float(step(ids).reduce_mean())
        kinds = {type(part).__name__ for part in model.modules()}
        assert kinds & {"DistributedLinear", "CausalModel", "Encoder"}, (name, kinds)
    return losses


def _check(ranks, case, names, delayed):
    size, config = TOPOLOGIES[case]
    config = {"ddp": True, "delayed_parameter_initialization": delayed, **config}
    # A job with a pipeline has one model.
    for some in [[name] for name in names] if "pp2" in case else [names]:
        for losses in ranks(_first_losses, size, some, config=config, timeout=200):
            for name, (expected, loss) in losses.items():
                assert loss == pytest.approx(expected, abs=1e-5), (name, losses)


@pytest.mark.parametrize(
    ("case", "names", "delayed"),
    [("tp1", ("own", "gpt2", "bert"), False), ("tp2", ("own", *FAMILIES), True), ("pp2 tp2", ("gpt2",), True)],
)
def test_the_first_loss_is_that_of_plain_pytorch(ranks, case, names, delayed):
    _check(ranks, case, names, delayed)


@pytest.mark.full
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("case", TOPOLOGIES)
def test_the_first_loss_of_every_family_at_every_topology(ranks, case, delayed):
    names = ("own", *FAMILIES)
    if "pp2" in case:
        # A statistic over microbatches is not one over the batch; and the masks of BERT's family are looked at in the
        # tracing step, which has no values where parameters have none.
        names = tuple(name for name in FAMILIES if not ("bert" in name and delayed))
    _check(ranks, case, names, delayed)


def _pretrained(folder):
    import transformers as hf

    if smp.rank() == 0:
        torch.manual_seed(1)
        _hugging_face("gpt2").save_pretrained(folder)
    smp.barrier()
    ids = torch.randint(3, 12, (4, 8), generator=torch.Generator().manual_seed(3))
    expected = float(_loss(hf.AutoModelForCausalLM.from_pretrained(folder).train(), ids).detach())
    found = []
    for keep in (True, False):
        with smp.tensor_parallelism(keep_weights=keep):
            model = hf.AutoModelForCausalLM.from_pretrained(folder)
        found.append(float(_loss(smp.DistributedModel(model).train(), ids).detach()))
    return expected, *found


def test_pretrained_weights_stay_unless_a_script_wants_new_ones(ranks, tmp_path):
    config = {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True}
    for expected, kept, new in ranks(_pretrained, 2, str(tmp_path), config=config):
        assert kept == pytest.approx(expected, abs=1e-5)
        assert abs(new - expected) > 0.05


def test_ties_are_those_of_the_model_whatever_its_configuration_says(solo):
    solo({})
    tied, untied = _hugging_face("llama"), _hugging_face("gpt2")
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with torch.no_grad():
        untied.lm_head.weight = nn.Parameter(untied.lm_head.weight * 2)
    ids = torch.randint(3, 12, (4, 8))
    for original in (tied, untied):
        expected = float(_loss(original, ids).detach())
        smp.set_tensor_parallelism(original)
        model = smp.DistributedModel(original)
        assert float(_loss(model, ids).detach()) == pytest.approx(expected, abs=1e-5)
        assert (model.module.lm_head is None) == (original is tied)


@torch.no_grad()
def test_weights_that_a_script_did_not_let_initialise_are_drawn(solo, monkeypatch, tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import PreTrainedModel

    solo({})
    trained = _hugging_face("gpt2")
    trained.save_pretrained(tmp_path)
    monkeypatch.setattr(PreTrainedModel, "init_weights", lambda model: None)
    for delayed in (False, True):
        with smp.tensor_parallelism(), smp.delay_param_initialization(enabled=delayed):
            skipped = _fresh("gpt2")
        model = smp.DistributedModel(skipped).module
        assert float(model.word_embedding.weight.std()) == pytest.approx(0.02, rel=0.2), "PyTorch's own would be 1"
        assert model.lm_head is None, "it is tied, as the configuration says"
    with smp.tensor_parallelism():
        loaded, filled, bert = AutoModelForCausalLM.from_pretrained(tmp_path), _fresh("gpt2"), _fresh("bert")
    filled.load_state_dict(trained.state_dict())
    filled.tie_weights()
    for kept in (loaded, filled):
        word = smp.DistributedModel(kept).module.word_embedding.weight
        assert torch.equal(word, trained.transformer.wte.weight)
    drawn = smp.DistributedModel(bert).module.bert.encoder.seq_layers[0].attention.query.weight
    assert float(drawn.std()) == pytest.approx(0.02, rel=0.2)


def test_a_module_whose_weights_would_be_lost_stays_as_it_is(solo):
    solo({})
    original = _hugging_face("gpt2")
    original.transformer.h[0].attn.register_parameter("adapter", nn.Parameter(torch.ones(3)))
    smp.set_tensor_parallelism(original)
    model, warnings = heard(lambda: smp.DistributedModel(original))
    assert model.module is original
    assert "seq_layers.0" in warnings[0] or "transformer.h.0.attn.adapter has no place in it" in warnings[0], warnings
    assert "keep_weights=False" in warnings[0]


def test_other_states_and_models_without_values(solo):
    solo({})
    smp.tp_register_with_module(Gate, smp.nn.DistributedLinear, lambda width: ((width, width), {}))
    with smp.tensor_parallelism():
        gate = Gate(4)
    _, warnings = heard(lambda: smp.DistributedModel(gate))
    assert "new weights: its own do not fit DistributedLinear (kernel has no place in it" in warnings[0], warnings
    smp.tp_register_with_module(Gate, smp.nn.DistributedLinear, lambda width: ((width, width), {}), None, None, dict)
    with smp.tensor_parallelism():
        gate = Gate(4)
    with pytest.raises(
        SMPUserError, match="the state_hook of the model .Gate. returned weights that DistributedLinear"
    ):
        smp.DistributedModel(gate)
    with torch.device("meta"), smp.tensor_parallelism():
        linear = nn.Linear(4, 4)
    model, warnings = heard(lambda: smp.DistributedModel(linear))
    assert "has no values" in warnings[0]
    assert float(model.weight.detach().abs().sum()) > 0


def _several_contexts():
    with smp.delay_param_initialization():
        original = _hugging_face("gpt2")
    with smp.delay_param_initialization():
        original.transformer.wpe = nn.Embedding(16, 32)
    smp.set_tensor_parallelism(original)
    return smp.DistributedModel(original)


def test_a_module_created_late_in_several_contexts_is_left_alone(solo):
    solo({})
    model, warnings = heard(_several_contexts)
    assert "several contexts of delayed creation" in warnings[0], warnings
    assert not any(parameter.is_meta for parameter in model.parameters())


def _early_optimizer(after):
    """Two steps with an optimizer whose groups have the parameters of the unwrapped model; weights, beside plain PyTorch's."""
    ids = torch.randint(3, 12, (4, 8), generator=torch.Generator().manual_seed(3))

    def optimizer_of(model):
        decayed = [p for n, p in model.named_parameters() if n.endswith("weight") and "ln_" not in n]
        others = [p for n, p in model.named_parameters() if not (n.endswith("weight") and "ln_" not in n)]
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.1)

    torch.manual_seed(5)
    original = _hugging_face("gpt2")
    alone = _hugging_face("gpt2")
    alone.load_state_dict(original.state_dict())
    plain = optimizer_of(alone)
    optimizer = optimizer_of(original)
    smp.set_tensor_parallelism(original)
    if after:
        model = smp.DistributedModel(original)
        optimizer = smp.DistributedOptimizer(optimizer)
    else:
        optimizer = smp.DistributedOptimizer(optimizer)
        model = smp.DistributedModel(original)
    for _ in range(2):
        for one, its in ((alone, plain), (model, optimizer)):
            its.zero_grad()
            loss = _loss(one, ids)
            loss.backward()
            its.step()
    from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2

    return translate_state_dict_to_hf_gpt2(model.state_dict()), alone.state_dict()


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("half", [{}, {"shard_optimizer_state": True}])
def test_an_optimizer_of_the_unwrapped_model_trains_its_distributed_form(ranks, after, half):
    from support.training.closeness import close

    config = {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True, **half}
    for found, expected in ranks(_early_optimizer, 2, after, config=config):
        for name, value in expected.items():
            close(found[name], value, name)


def test_an_optimizer_of_weights_that_were_thrown_away_is_refused(solo):
    solo({})
    linear = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    smp.set_tensor_parallelism(linear, keep_weights=False)
    model = smp.DistributedModel(linear)
    with pytest.raises(SMPUserError, match=r"has a parameter of shape \[4, 4\] of a module that tensor parallelism"):
        smp.DistributedOptimizer(optimizer)
    assert model.module.weight.shape == (4, 4)
