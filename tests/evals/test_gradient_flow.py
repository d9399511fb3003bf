"""Closed forms against autograd, and gradient sizes against a model's own ``.grad``."""

import pytest
import torch
import torch.nn.functional as F
from numbers_of import mean
from tiny_models import tiny_lm
from torch import Tensor

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.evals import gradient_flow
from diff_transformer.evals.gradient_flow import Settings, attention_weights, evaluate_gradient_flow, gradient_sizes
from diff_transformer.evals.lm import CausalLM
from diff_transformer.model.presets import preset
from diff_transformer.ops.api import diff_attention


def tiny(**fields) -> DiffTransformerForCausalLM:
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(preset("debug", vocab_size=300, **fields))


@pytest.fixture
def ids():
    return torch.randint(0, 256, (6, 20), generator=torch.Generator().manual_seed(1))


def closed_forms(
    x: Tensor, weights: dict[str, Tensor], lam: Tensor, upstream: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Gradients of one head ``(A1 - lambda A2) V W_O``, without its norm, written out as in appendix F.

    Args:
        x: input X, ``[N, m]``.
        weights: ``w_q1, w_q2, w_k1, w_k2 [m, d]``, ``w_v [m, 2d]``, ``w_o [2d, m]``.
        lam: lambda, a scalar.
        upstream: G, the gradient of the loss by the head's output, ``[N, m]``.
        mask: bool ``[N, N]``, True where a query may attend.

    Returns:
        The gradient of each weight, in its shape, and that of ``lambda``.
    """
    q1, q2, k1, k2, v = (x @ weights[name] for name in ("w_q1", "w_q2", "w_k1", "w_k2", "w_v"))
    scale = q1.shape[1] ** -0.5
    a1, a2 = (
        (scale * q @ k.T).masked_fill(~mask, float("-inf")).softmax(-1) for q, k in ((q1, k1), (q2, k2))
    )  # [N, N]
    difference = a1 - lam * a2
    back = upstream @ weights["w_o"].T  # G' = G W_O^T, [N, 2d]
    to_maps = back @ v.T  # G' V^T, [N, N]

    def to_scores(a: Tensor) -> Tensor:
        weighted = a * to_maps
        return weighted - a * weighted.sum(-1, keepdim=True)  # A o (G' V^T) - A o ((A o (G' V^T)) J)

    s1, s2 = to_scores(a1), -lam * to_scores(a2)
    return {
        "w_o": (difference @ v).T @ upstream,
        "w_v": x.T @ difference.T @ back,
        "w_q1": scale * x.T @ s1 @ k1,
        "w_q2": scale * x.T @ s2 @ k2,
        "w_k1": scale * x.T @ s1.T @ q1,
        "w_k2": scale * x.T @ s2.T @ q2,
        "lambda": -(a2 * to_maps).sum(),
    }


def closed_form_errors(seed: int, *, tokens: int = 48, width: int = 40, head_dim: int = 8) -> dict[str, float]:
    """Largest error of each closed form on a random head, relative to the largest entry of autograd's gradient, fp64.

    Odd seeds are causal, even seeds are not. ``softmax_*`` is softmax attention: lambda = 0 and the first map.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = dict.fromkeys(("w_q1", "w_q2", "w_k1", "w_k2"), (width, head_dim))
    shapes |= {"w_v": (width, 2 * head_dim), "w_o": (2 * head_dim, width)}
    x, upstream, lam = draw(tokens, width), draw(tokens, width), draw(1)[0].abs()
    weights = {name: draw(*shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    causal = seed % 2 == 1
    mask = torch.ones(tokens, tokens, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    found = {}
    for prefix, value in (("", lam), ("softmax_", torch.zeros((), dtype=torch.float64))):
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()} | {
            "lambda": value.clone().requires_grad_()
        }
        q1, q2, k1, k2, v = ((x @ leaves[n])[None, None] for n in ("w_q1", "w_q2", "w_k1", "w_k2", "w_v"))
        if prefix:
            attended = F.scaled_dot_product_attention(q1, k1, v, is_causal=causal)
        else:
            attended = diff_attention(q1, q2, k1, k2, v, leaves["lambda"], is_causal=causal, backend="reference")
        (attended[0, 0] @ leaves["w_o"] * upstream).sum().backward()
        for name, ours in closed_forms(x, weights, value, upstream, mask).items():
            theirs = leaves[name].grad
            if theirs is not None:  # softmax attention has neither a second map nor lambda
                label = f"{prefix}{name.removesuffix('1')}" if prefix else name
                found[label] = float((ours - theirs).abs().max() / theirs.abs().max())
    return found


@pytest.mark.parametrize("seed", range(6))
def test_closed_forms_are_autograd_s(seed):
    errors = closed_form_errors(seed)
    assert set(errors) == {
        "w_q1", "w_q2", "w_k1", "w_k2", "w_v", "w_o", "lambda", "softmax_w_q", "softmax_w_k", "softmax_w_v",
        "softmax_w_o",
    }  # fmt: skip
    assert max(errors.values()) < 1e-12


def test_sizes_are_those_of_the_model_s_own_gradients(ids):
    model = tiny()
    sizes = gradient_sizes(model, attention_weights(model), ids)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert sizes["loss"] == pytest.approx(loss.item(), rel=1e-5)
    attention = model.model.layers[1].self_attn
    gradient = attention.q_proj.weight.grad.view(4, 8, 32)  # [heads, d, width]; heads 0 and 2 are first maps
    rms = lambda g: g.square().mean().sqrt().item()  # noqa: E731
    expected = {
        "q": rms(gradient), "q1": rms(gradient[[0, 2]]), "q2": rms(gradient[[1, 3]]),
        "k2": rms(attention.k_proj.weight.grad.view(4, 8, 32)[1::2]), "v": rms(attention.v_proj.weight.grad),
        "o": rms(attention.o_proj.weight.grad), "head_norm": rms(attention.core.head_norm.weight.grad),
        "lambda": rms(torch.stack([p.grad for p in attention.core.lam.parameters()])),
    }  # fmt: skip
    found = {kind: size for kind, layer, size in sizes["rms"] if layer == 1}
    for kind, value in expected.items():
        assert found[kind] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "diffllama", "gpt2"])
def test_other_models_have_their_projections(family, ids):
    result = evaluate_gradient_flow(tiny_lm(family), ids, Settings())
    for kind in ("qkv", "o") if family == "gpt2" else "qkvo":
        assert min(mean(result, "rms", part=kind, layer=layer) for layer in range(2)) > 0
    assert {row["state"] for row in result.rows} == {"model"}


def test_the_pair_at_the_start_shares_its_weights(ids, monkeypatch):
    models: dict[str, list] = {}
    measure = gradient_flow.gradient_sizes

    def watched(model, weights, x):
        models.setdefault(model.config.attention, []).append(model)
        return measure(model, weights, x)

    monkeypatch.setattr(gradient_flow, "gradient_sizes", watched)
    trained = tiny()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    result = evaluate_gradient_flow(CausalLM(trained, byte_tokenizer(), "t"), ids, Settings(batch_size=6))
    given, diff = models["diff"]
    (softmax,) = models["softmax"]
    assert given is trained
    ours, theirs = diff.state_dict(), softmax.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert set(ours) - set(theirs) == {name for name in ours if "core" in name}
    assert mean(result, "rms", state="init_diff", part="q1") != mean(result, "rms", state="model", part="q1")


def test_a_transformer_s_pair_is_the_same_pair(ids):
    options = {"batch_size": 3, "seed": 4}
    results = [
        evaluate_gradient_flow(CausalLM(tiny(attention=a), byte_tokenizer(), a), ids, Settings(**options))
        for a in ("diff", "softmax")
    ]
    init = [[row for row in r.rows if row["state"] != "model"] for r in results]
    assert init[0] == init[1]
    assert "q1" not in {row["part"] for row in results[1].rows if row["state"] == "model"}


def test_frozen_models_can_be_measured_and_stay_frozen(ids):
    model = tiny().requires_grad_(False)
    free = tiny()
    sizes = gradient_sizes(model, attention_weights(model), ids)
    assert sizes == gradient_sizes(free, attention_weights(free), ids)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_sums_over_batches_do_not_hide_in_the_mean(ids):
    """Each batch is one gradient: the reported size is the mean of the sizes, not the size of the mean."""
    lm = CausalLM(tiny(), byte_tokenizer(), "t")
    results = [evaluate_gradient_flow(lm, x, Settings(batch_size=3)) for x in (ids, *ids.split(3))]
    both, *each = (mean(result, "rms", state="model", part="v", layer=0) for result in results)
    assert both == pytest.approx(sum(each) / 2)


def test_a_transformer_whose_heads_form_no_pairs_is_measured_without_a_pair(ids):
    """As SmolLM2-135M, which has nine heads over three."""
    model = tiny(attention="softmax", num_attention_heads=9, num_key_value_heads=3, head_dim=8)
    result = evaluate_gradient_flow(CausalLM(model, byte_tokenizer(), "t"), ids, Settings())
    assert {row["state"] for row in result.rows} == {"model"}
