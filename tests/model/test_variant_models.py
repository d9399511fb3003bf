"""What the models of all variants have in common: precision on disk, packed rows, telemetry, training, cost."""

from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from diff_transformer import DiffTransformerForCausalLM, lambda_init
from diff_transformer.model.cost import model_cost
from diff_transformer.model.matching import VARIANTS
from diff_transformer.model.presets import preset

KINDS = pytest.mark.parametrize("kind", VARIANTS)


def make(kind, **fields):
    torch.manual_seed(0)
    fields = {"embedding_initializer_range": 1.0, **VARIANTS[kind], **fields}
    return DiffTransformerForCausalLM(preset("debug", **fields)).eval()


def tokens(rows=2, length=20):
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(1))


@KINDS
def test_packed_documents_are_as_if_alone(kind):
    model, ids = make(kind), tokens()
    bounds = torch.tensor([0, 7, 20, 25, 40], dtype=torch.int32)
    packed = model(ids, cu_seq_lens_q=bounds, max_length_q=15).logits.flatten(0, 1)
    rows = ids.flatten()
    parts = [model(rows[None, a:b]).logits[0] for a, b in pairwise(bounds)]
    torch.testing.assert_close(packed, torch.cat(parts), atol=2e-5, rtol=1e-5)


@KINDS
def test_telemetry(kind):
    model = make(kind)
    model(tokens())
    lambdas = model.lambdas()
    assert (lambdas.dtype, lambdas.requires_grad) == (torch.float32, False)
    cores = [layer.self_attn.core for layer in model.model.layers]
    if kind in ("softmax", "softmax_norm", "gated"):
        assert not lambdas.numel()
    elif kind in ("diff_v2", "diff_v3"):
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens()))
        columns = cores[0].lam.columns
        expected = (x @ cores[0].lam.proj.weight[columns - 1 :: columns].T).sigmoid().mean()
        assert lambdas[0] == pytest.approx(expected.item(), abs=1e-6)
        assert lambdas[0] != 0.5
        assert len(lambdas) == 2
    elif kind == "fixed_lambda":
        assert lambdas.tolist() == pytest.approx([lambda_init(0), lambda_init(1)], rel=1e-6)
    else:
        assert lambdas.tolist() == pytest.approx([core.lam().item() for core in cores])


@KINDS
def test_bf16_autocast_trains(kind):
    model, ids = make(kind).train(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    exact = make(kind)(ids, labels=ids).loss
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@KINDS
@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2, "value_head_dim": 6, "tie_word_embeddings": False}])
def test_cost_is_what_the_model_does(kind, fields):
    """FLOPs of all products of a forward pass, in which every query sees every key (2 T - 1 tokens on average), and
    the bytes that a cache then holds."""
    model, ids = make(kind, **fields), tokens(1, 20)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    config, heads, keys = model.config, model.config.heads, 20
    cost = model_cost(config, length=2 * keys - 1, bytes_per_value=4)
    norms = 4 * heads.outputs * heads.value_dim if model.model.layers[0].self_attn.core.head_norm is not None else 0
    subtraction = 2 * heads.outputs * keys if config.variant.maps == 2 else 0
    norms += heads.outputs * heads.value_dim * (config.variant.gate is not None)
    products = cost.flops_per_token - config.num_hidden_layers * (norms + subtraction)
    counted = counter.get_total_flops() / 20
    if kind == "dint":  # the backends compute scores anew for the product of the first map
        counted -= config.num_hidden_layers * 2 * heads.queries * heads.head_dim * keys
    if kind == "grouped_diff":  # "eager" repeats the noise map for each of its signal heads
        counted -= config.num_hidden_layers * 2 * (2 * heads.outputs - heads.queries) * heads.head_dim * keys
    assert products == counted
    if kind == "dint":
        return
    cache = DynamicCache(config=config)
    model(ids, past_key_values=cache)
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    assert held == cost.kv_bytes_per_token * 20
