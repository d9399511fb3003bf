import math

import numpy as np
import pytest
import torch

from diff_transformer import DiffAttention, DiffTransformerConfig
from diff_transformer.model.lambdas import LearnedLambda, lambda_init


def test_lambda_init_counts_layers_from_zero():
    assert lambda_init(0) == pytest.approx(0.2)  # the paper's l = 1
    assert lambda_init(27) == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * 27))
    with pytest.raises(ValueError, match="counted from 0"):
        lambda_init(-1)
    assert lambda_init(np.int64(3)) == lambda_init(3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "lambda_init is 1; heads are multiplied by 1 - lambda_init, which must be positive"),
        (1.5, "give a number below 1, or 'depth'"),
        (float("nan"), "lambda_init is nan; .* a number below 1"),
        (float("-inf"), "lambda_init is -inf; .* a number below 1"),
        (True, "lambda_init is True; .* a number below 1"),
        ("deep", "lambda_init is 'deep'; accepted"),
    ],
)
@pytest.mark.parametrize("head_norm", [True, False])
def test_a_lambda_init_that_kills_a_layer_is_refused(value, message, head_norm):
    with pytest.raises(ValueError, match=message):
        DiffTransformerConfig(lambda_init=value, head_norm=head_norm)
    with pytest.raises(ValueError, match=message):
        DiffAttention(32, 4, lambda_init=value, head_norm=head_norm)


def test_value_is_the_formula():
    lam = LearnedLambda(4, 0.2)
    with torch.no_grad():
        lam.lambda_q1.copy_(torch.tensor([1.0, 0, 0, 0]))
        lam.lambda_k1.copy_(torch.tensor([0.5, 9, 9, 9]))
        lam.lambda_q2.copy_(torch.tensor([0.0, 1, 0, 0]))
        lam.lambda_k2.copy_(torch.tensor([9.0, -0.25, 9, 9]))
    assert lam().item() == pytest.approx(math.exp(0.5) - math.exp(-0.25) + 0.2, rel=1e-6)
