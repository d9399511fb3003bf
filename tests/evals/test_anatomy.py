"""The anatomy of heads on attention with known answers, and on real models."""

import math

import pandas as pd
import pytest
import torch
from numbers_of import measured
from tiny_models import tiny_lm
from transformers import JambaConfig, JambaForCausalLM

from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.evals.anatomy import Settings, anatomy, linear_cka, of_attention, run
from diff_transformer.evals.attention_call import AttentionCall
from diff_transformer.evals.gradient_flow import evaluate_gradient_flow
from diff_transformer.evals.hessian import hessian_eigenvalues
from diff_transformer.evals.lm import CausalLM
from diff_transformer.evals.outliers import evaluate_outliers
from diff_transformer.evals.samples import ALL
from diff_transformer.lab.quantities import QUANTITIES
from diff_transformer.lab.rows import Rows, row

T, H, D = 6, 3, 4


def call(q1, k1, **more):
    return AttentionCall(0, q1, k1, 1.0, None, True, **more)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_uniform_attention_has_the_entropy_of_its_keys():
    of = of_attention(call(torch.zeros(1, H, T, D), drawn(1, H, T, D), v=drawn(1, H, T, D)))
    expected = sum(math.log(n) for n in range(1, T + 1)) / T
    assert of["entropy"].tolist() == pytest.approx([expected] * H)
    assert of["keys"].tolist() == pytest.approx([math.exp(expected)] * H)
    assert of["sink"].tolist() == pytest.approx([sum(1 / n for n in range(1, T + 1)) / T] * H)
    assert of["distance"].tolist() == pytest.approx([0.0] * H, abs=1e-6)
    assert not {"negative", "negative_mass", "lam", "gate"} & of.keys()


def test_equal_maps_subtracted_are_as_negative_as_lambda_says():
    """With equal maps the difference is (1 - lambda) A: all of it is negative where lambda is above 1."""
    q, k = drawn(1, H, T, D), drawn(1, H, T, D, seed=1)
    lam = torch.tensor([0.5, 2.0, 0.5])[None, :, None, None]
    gate = torch.stack([torch.full((T, 1), 1.0), torch.full((T, 1), 1.0), torch.linspace(0.6, 1.0, T)[:, None]])[None]
    of = of_attention(call(q, k, q2=q, k2=k, lam=lam, first=gate))
    assert of["negative"].tolist() == pytest.approx([0, 1, 0])
    assert of["negative_mass"].tolist() == pytest.approx([0, 1, 0])
    assert of["lam"].tolist() == pytest.approx([0.5, 2.0, 0.5])
    assert of["lam_spread"].tolist() == pytest.approx([0] * 3)
    assert of["gate"].tolist() == pytest.approx([1, 1, 0.8])
    assert of["gate_spread"][2].item() == pytest.approx(torch.linspace(0.6, 1.0, T).std(correction=0).item())
    assert "cka" not in of


def test_equal_heads_are_no_distance_apart_and_a_turned_head_is_the_same_output():
    q, k = drawn(1, 1, T, D).expand(1, H, T, D), drawn(1, 1, T, D, seed=1).expand(1, H, T, D)
    of = of_attention(call(q, k, v=drawn(1, 1, T, D, seed=2).expand(1, H, T, D)))
    assert of["distance"].tolist() == pytest.approx([0.0] * H, abs=1e-6)
    assert of["cka"].tolist() == pytest.approx([1.0] * H, abs=1e-5)
    turn, _ = torch.linalg.qr(drawn(D, D, seed=3))
    outputs = drawn(1, 200, D, seed=4)
    pairs = linear_cka(torch.cat([outputs, 3 * outputs @ turn + 1, drawn(1, 200, D, seed=5)]))
    assert pairs[0, 1].item() == pytest.approx(1, abs=1e-6)
    assert pairs[0, 2].item() < 0.2


@pytest.mark.parametrize("family", ["diff", "softmax", "llama", "gpt2", "diffllama"])
def test_importance_is_the_derivative_by_a_factor_on_the_head(family):
    lm = tiny_lm(family, std=0.3)
    ids = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
    rows = anatomy(lm, ids)
    heads = 1 + max(row["head"] for row in rows)
    assert len(rows) == 2 * heads
    assert ("negative" in rows[0]) == (family in ("diff", "diffllama"))
    assert ("cka" in rows[0]) == (family != "diffllama")
    ends = ("attn.o_proj", "attn.c_proj")
    _, projection = (module for name, module in lm.model.named_modules() if name.endswith(ends))
    losses = []
    for factor in (1.001, 0.999):

        def scaled(module, args, factor=factor):
            each = args[0].unflatten(-1, (heads, -1)).clone()
            each[..., 1, :] *= factor
            return (each.flatten(-2),)

        handle = projection.register_forward_pre_hook(scaled)
        with torch.no_grad():
            losses.append(lm.model(ids, labels=ids).loss.item())
        handle.remove()
    assert rows[heads + 1]["importance"] == pytest.approx(abs(losses[0] - losses[1]) / 0.002, abs=2e-3)
    assert lm.model(ids).logits.shape[1] == 24  # hooks are gone
    lm.model.requires_grad_(False)
    assert anatomy(lm, ids) == rows


def test_of_a_hybrid_the_layers_with_attention_are_measured():
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 2}  # fmt: skip
    mamba = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4}
    lm = CausalLM(JambaForCausalLM(JambaConfig(**sizes, **mamba)), byte_tokenizer(), "jamba")
    ids = torch.randint(0, 256, (1, 24))
    assert {row["layer"] for row in anatomy(lm, ids)} == {1}
    assert {row["layer"] for row in evaluate_gradient_flow(lm, ids).rows} == {1}
    rows = evaluate_outliers(lm, ids).rows
    assert {row["layer"] for row in rows if row.get("kind") == "logits"} == {-1, 1}
    assert {row["layer"] for row in rows if row.get("kind") == "hidden"} == {-1, 0, 1}


def test_quantities_average_heads_and_measure_inequality():
    made = [
        row("anatomy", "diff", layer=0, head=head, example=example, sink=sink, importance=importance)
        for example in (0, 1)
        for head, (sink, importance) in enumerate(((0.1, 1.0), (0.3, 1.0), (0.2, 1.0 if example else 4.0)))
    ]
    rows = Rows(made)
    assert QUANTITIES["anatomy_sink"].values(rows, "diff")[0] == pytest.approx(0.2)
    assert QUANTITIES["anatomy_gini"].values(rows, "diff")[0] == pytest.approx((1 / 3 + 0) / 2)
    assert QUANTITIES["anatomy_cka"].values(rows, "diff") == {}


def test_the_experiment_writes_a_row_for_each_head(tmp_path):
    record = measured("anatomy", tiny_lm("diff"), Settings(length=32, samples=3), tmp_path / "r.jsonl.gz")
    frame = pd.DataFrame(record.rows)
    assert len(frame) == 3 * 2 * frame["head"].nunique()
    assert frame["negative_mass"].between(0, 1).all()


class Quadratic(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(drawn(size))


def test_the_eigenvalues_of_a_quadratic_loss_are_those_of_its_matrix():
    matrix = drawn(40, 40, seed=1).double()
    matrix = matrix + matrix.T
    exact = torch.linalg.eigvalsh(matrix)
    for steps, shown in ((40, slice(None)), (20, [0, -1])):
        values = hessian_eigenvalues(Quadratic(40), lambda m: m.weight @ matrix @ m.weight / 2, steps)
        torch.testing.assert_close(values[shown], exact[shown], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["diff", "llama"])
def test_few_steps_reach_the_ends_of_the_spectrum(family):
    lm, ends = tiny_lm(family, std=0.3), []
    for steps in (24, 40):
        result = run(lm, Settings(length=24, samples=2, hessian=steps), ALL)
        values = {row["rank"]: row["value"] for row in result.rows if row.get("experiment") == "hessian"}
        assert [*values] == [1, 2, 3, 4, 5, -1, -2, -3, -4, -5]
        ends.append((values[1], values[-1]))
    assert ends[0] == pytest.approx(ends[1], rel=1e-2)
    assert ends[0][0] > 0 > ends[0][1]
