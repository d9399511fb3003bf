from itertools import pairwise

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

from diff_transformer import DiffTransformerForCausalLM, diff_attention, lambda_init
from diff_transformer.model import cores
from diff_transformer.model.cost import count_parameters, model_cost
from diff_transformer.model.matching import VARIANTS
from diff_transformer.model.presets import preset
from diff_transformer.model.wider import wider

ALL = pytest.mark.parametrize("attention", VARIANTS)
CACHED = pytest.mark.parametrize("attention", [kind for kind in VARIANTS if kind != "dint"])


def make(attention="diff", **fields):
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(preset("debug", **{**VARIANTS[attention], **fields})).eval()


def tokens(rows=2, length=20):
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(1))


@ALL
@pytest.mark.parametrize("tied", [True, False])
def test_saving_and_loading_keeps_the_logits(attention, tied, tmp_path):
    model = make(attention, tie_word_embeddings=tied, num_key_value_heads=2)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    base = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(base(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)


@ALL
def test_parameter_count_is_the_cost_model(attention):
    grouped = {"tie_word_embeddings": False, "num_key_value_heads": 2}
    for fields in ({}, grouped, {"head_norm": "no_weight"}, {"value_head_dim": 10}):
        model = make(attention, **fields)
        assert sum(p.numel() for p in model.parameters()) == sum(count_parameters(model.config).values())


@CACHED
def test_generation_begins_from_embeddings(attention):
    model, ids = make(attention, embedding_initializer_range=1.0), tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **options)
    assert torch.equal(out, model.generate(ids, **options)[:, 6:])


def test_the_operator_sees_views_of_a_static_cache(monkeypatch):
    """A copy would read and write the whole cache once more in every step."""
    model, cached = make(num_key_value_heads=2), []
    cache = StaticCache(config=model.config, max_cache_len=16)

    def spy(*arguments, **options):
        cached.extend(arguments[2:5])  # k1, k2, v
        return diff_attention(*arguments, **options)

    monkeypatch.setattr(cores, "diff_attention", spy)
    model(tokens(1, 6), past_key_values=cache, use_cache=True)
    held = {x.untyped_storage().data_ptr() for layer in cache.layers for x in (layer.keys, layer.values)}
    assert len(cached) == 3 * model.config.num_hidden_layers
    assert {x.untyped_storage().data_ptr() for x in cached} == held


@ALL
def test_left_padding_changes_nothing(attention):
    model, ids = make(attention), tokens(1, 9)
    padded = torch.cat((torch.zeros(1, 5, dtype=torch.long), ids), 1)
    mask = torch.tensor([[0] * 5 + [1] * 9])
    logits = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0)).logits[:, 5:]
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    generated = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    alone = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(generated[:, 14:], alone[:, 9:])


@ALL
def test_gradient_checkpointing_gives_the_same_gradients(attention):
    model, ids = make(attention).train(), tokens()
    model(ids, labels=ids).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(ids, labels=ids).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_lambda_stays_fp32_in_a_bf16_model(tmp_path):
    model = make()
    vector = model.model.layers[1].self_attn.core.lam.lambda_k2.clone()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for candidate in (loaded, model.to(torch.bfloat16)):
        lam = candidate.model.layers[1].self_attn.core.lam
        assert candidate.lm_head.weight.dtype == torch.bfloat16
        assert lam.lambda_k2.dtype == lam().dtype == torch.float32
        assert torch.equal(lam.lambda_k2, vector)
        assert candidate(tokens()).logits.isfinite().all()


def test_initialisation_follows_the_fields():
    model = make(hidden_size=64, embedding_initializer_range=0.5, head_norm_init=0.1)
    layer = model.model.layers[0]
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(layer.self_attn.core.head_norm.weight, torch.full((32,), 0.1))
    assert make(lambda_init=0.5).model.layers[1].self_attn.core.lam.initial == 0.5


def test_models_of_a_pair_share_every_name_but_lambda_and_head_norm():
    ours, theirs = make().state_dict(), make("softmax").state_dict()
    assert theirs.keys() <= ours.keys()
    assert all(ours[name].shape == theirs[name].shape for name in theirs)
    assert {name.split("core.")[1].split(".")[0] for name in ours.keys() - theirs.keys()} == {"lam", "head_norm"}


@pytest.mark.parametrize(
    "attention",
    ["diff", *(pytest.param(k, marks=pytest.mark.slow) for k in ("diff_v2", "softmax", "grouped_diff", "dint"))],
)
def test_forward_compiles_without_graph_breaks(attention):
    torch._dynamo.reset()  # models that other tests compiled count against its limit
    model, ids = make(attention), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, atol=1e-5, rtol=1e-5
    )


def test_one_of_ids_and_embeddings():
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        make().model()


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: wider(m.bfloat16())])
def test_casts_keep_the_frequencies_of_the_rotary_embedding(cast):
    """In bf16, positions beyond 256 would collapse (huggingface/transformers issue 25681)."""
    model = DiffTransformerForCausalLM(preset("debug", attention="softmax"))
    exact, model = model.model.rotary_emb.inv_freq.clone(), cast(model)
    assert model.dtype != torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    assert torch.equal(model.model.rotary_emb.original_inv_freq, exact)


@ALL
def test_packed_documents_are_as_if_alone(attention):
    model, ids = make(attention, embedding_initializer_range=1.0), tokens()
    bounds = torch.tensor([0, 7, 20, 25, 40], dtype=torch.int32)
    packed = model(ids, cu_seq_lens_q=bounds, max_length_q=15).logits.flatten(0, 1)
    rows = ids.flatten()
    parts = [model(rows[None, a:b]).logits[0] for a, b in pairwise(bounds)]
    torch.testing.assert_close(packed, torch.cat(parts), atol=2e-5, rtol=1e-5)


@ALL
def test_telemetry(attention):
    model = make(attention, embedding_initializer_range=1.0)
    model.train()(tokens())
    lambdas = model.lambdas()
    assert (lambdas.dtype, lambdas.requires_grad) == (torch.float32, False)
    cores = [layer.self_attn.core for layer in model.model.layers]
    if attention in ("softmax", "softmax_norm", "gated"):
        assert not lambdas.numel()
    elif attention in ("diff_v2", "diff_v3"):
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens()))
        columns = cores[0].lam.columns
        expected = (x @ cores[0].lam.proj.weight[columns - 1 :: columns].T).sigmoid().mean()
        assert lambdas[0] == pytest.approx(expected.item(), abs=1e-6)
        assert lambdas[0] != 0.5
        assert len(lambdas) == 2
    elif attention == "fixed_lambda":
        assert lambdas.tolist() == pytest.approx([lambda_init(0), lambda_init(1)], rel=1e-6)
    else:
        assert lambdas.tolist() == pytest.approx([core.lam().item() for core in cores])


@ALL
def test_bf16_autocast_trains(attention):
    model, ids = make(attention).train(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    exact = make(attention)(ids, labels=ids).loss
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@ALL
@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2, "value_head_dim": 6, "tie_word_embeddings": False}])
def test_cost_is_what_the_model_does(attention, fields):
    """FLOPs of all products of a forward pass, in which every query sees every key (2 T - 1 tokens on average), and
    the bytes that a cache then holds."""
    model, ids = make(attention, **{"embedding_initializer_range": 1.0, **fields}), tokens(1, 20)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, use_cache=False)
    config, heads, keys = model.config, model.config.heads, 20
    cost = model_cost(config, length=2 * keys - 1, bytes_per_value=4)
    norms = 4 * heads.outputs * heads.value_dim if model.model.layers[0].self_attn.core.head_norm is not None else 0
    subtraction = 2 * heads.outputs * keys if config.variant.maps == 2 else 0
    norms += heads.outputs * heads.value_dim * (config.variant.gate is not None)
    products = cost.flops_per_token - config.num_hidden_layers * (norms + subtraction)
    counted = counter.get_total_flops() / 20
    if attention == "dint":  # the backends compute scores anew for the product of the first map
        counted -= config.num_hidden_layers * 2 * heads.queries * heads.head_dim * keys
    if attention == "grouped_diff":  # "eager" repeats the noise map for each of its signal heads
        counted -= config.num_hidden_layers * 2 * (2 * heads.outputs - heads.queries) * heads.head_dim * keys
    assert products == counted
    if attention == "dint":
        return
    cache = DynamicCache(config=config)
    model(ids, past_key_values=cache)
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    assert held == cost.kv_bytes_per_token * 20
