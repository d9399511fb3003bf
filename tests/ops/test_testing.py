"""The instruments themselves: a criterion that cannot fail, or poison that is not there, would prove nothing."""

import pytest
import torch

from diff_transformer.ops import diff_attention
from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs


def test_budget_without_eager_is_that_of_fp32():
    exact = torch.zeros(3)
    assert_within_budget(exact + 9e-6, exact)
    with pytest.raises(AssertionError, match=r"dk1 \(torch.float32\) is off by 1.100e-05; allowed is 1.000e-05"):
        assert_within_budget(exact + 1.1e-5, exact, what="dk1")
    assert_within_budget(exact + 100 + 9e-4, exact + 100)
    with pytest.raises(AssertionError, match=r"largest value 1\.000e"):
        assert_within_budget(exact + 100 + 2e-3, exact + 100)


def test_budget_doubles_the_eager_error():
    exact, actual = torch.zeros(3), torch.full((3,), 0.5, dtype=torch.bfloat16)
    assert_within_budget(actual, exact, exact - 0.25)
    with pytest.raises(AssertionError, match=r"2 \* eager error 2\.4"):
        assert_within_budget(actual, exact, exact - 0.24)


def test_budget_allows_one_rounding_of_the_largest_value():
    exact = torch.tensor([1.0, 1.0])
    assert_within_budget(torch.tensor([1.0 - 2**-8, 1.0]).bfloat16(), exact, exact)
    with pytest.raises(AssertionError):
        assert_within_budget(torch.tensor([1.0 - 2**-7, 1.0]).bfloat16(), exact, exact)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_budget_refuses_what_is_not_finite(bad):
    with pytest.raises(AssertionError, match="1 values that are NaN or infinite"):
        assert_within_budget(torch.tensor([1.0, bad]), torch.tensor([1.0, bad]), torch.tensor([1.0, bad]))


def test_budget_sees_a_wrong_lambda():
    x = make_inputs(T=63, dtype=torch.bfloat16, requires_grad=False)
    exact = diff_attention(*x.to(torch.float64), backend="reference")
    assert_within_budget(diff_attention(*x), exact, eager_diff_attention(*x))
    with pytest.raises(AssertionError):
        assert_within_budget(diff_attention(*x[:5], x.lam + 0.1), exact, eager_diff_attention(*x))


def test_empty_tensors_are_poisoned_here():
    for x in (torch.empty(3), torch.empty_like(torch.ones(2)), torch.ones(1).new_empty(2), torch.empty(2).bfloat16()):
        assert x.isnan().all()
