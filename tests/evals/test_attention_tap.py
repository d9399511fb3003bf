"""Experiments that look into attention, on a small model of every variant."""

import base64

import numpy as np
import pytest
import torch
from numbers_of import mean
from tiny_models import tiny_lm, tiny_model

from diff_transformer.evals import gradient_flow
from diff_transformer.evals.explorer import attention_entry
from diff_transformer.evals.gradient_flow import attention_weights, evaluate_gradient_flow
from diff_transformer.evals.outliers import evaluate_outliers
from diff_transformer.model.matching import VARIANTS

KINDS = pytest.mark.parametrize("kind", VARIANTS)


def tokens(rows=2, length=20):
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(1))


@KINDS
def test_outliers_and_gradients(kind):
    lm, ids = tiny_lm(kind, vocab_size=512, std=0.3), tokens()
    top = {"experiment": "outliers_top", "kind": "logits", "layer": -1}
    largest = evaluate_outliers(lm, ids)
    assert mean(largest, "value", k=1, **top) >= mean(largest, "value", k=2, **top) > 0
    flow = evaluate_gradient_flow(lm, ids, gradient_flow.Settings())
    assert mean(flow, "rms", state="model", part="q") > 0
    assert mean(flow, "rms", state="init_diff", part="v") > 0
    parts = {row["part"] for row in flow.rows if row["state"] == "model"}
    one_map = ("softmax", "softmax_norm", "gated")
    assert ("lambda" in parts) == (kind not in ("softmax", "softmax_norm", "fixed_lambda"))
    assert ("k2" in parts) == (kind not in (*one_map, "diff_v2", "diff_v3"))


def test_which_heads_make_which_map():
    weights = attention_weights(tiny_model("grouped_diff"))[0]
    assert {kind: part[0].heads for kind, part in weights.items() if kind[1:] in ("1", "2")} == {
        "q1": (0, 1, 2), "q2": (3,), "k1": (0,), "k2": (1,)}  # fmt: skip
    weights = attention_weights(tiny_model("diff_v2"))[0]
    assert weights["q2"][0].heads == (1, 3, 5, 7)


@pytest.mark.parametrize("kind", [kind for kind in VARIANTS if kind != "dint"])
def test_the_explorer_shows_maps_that_subtract_to_the_models_own(kind):
    """To the rounding of 8 bits; DINT has a third map."""
    lm, ids = tiny_lm(kind, std=0.3), tokens(1, 12) % 256
    entry = attention_entry(lm, ids[0].numpy(), title="", answer="x", answer_span=(2, 3))

    def decoded(name):
        coded = np.frombuffer(base64.b64decode(entry[name]), np.uint8).astype(float)
        maps = np.zeros((entry["layers"], entry["heads"], 12, 12))
        maps[..., *np.tril_indices(12)] = ((coded / 255) ** 2).reshape(*maps.shape[:2], -1)
        return torch.from_numpy(maps)

    shown = decoded("first")
    if "second" in entry:
        shown = shown - torch.tensor(entry["lambda"])[:, None, None, None] * decoded("second")
    exact = torch.cat(lm.model(ids, output_attentions=True).attentions)
    torch.testing.assert_close(shown.float(), exact, atol=0.02, rtol=0)
