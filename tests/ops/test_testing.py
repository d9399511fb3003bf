"""The instruments themselves: a criterion that cannot fail, or poison that is not there, would prove nothing."""

import pytest
import torch

from diff_transformer.ops import diff_attention
from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs, peak_memory


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


def test_budget_refuses_another_shape():
    with pytest.raises(AssertionError, match=r"shape \[3\]; expected \[1, 3\]"):
        assert_within_budget(torch.zeros(3), torch.zeros(1, 3))


def test_budget_sees_a_wrong_lambda():
    x = make_inputs(T=63, dtype=torch.bfloat16, requires_grad=False)
    exact = diff_attention(*x.to(torch.float64), backend="reference")
    assert_within_budget(diff_attention(*x), exact, eager_diff_attention(*x))
    with pytest.raises(AssertionError):
        assert_within_budget(diff_attention(*x[:5], x.lam + 0.1), exact, eager_diff_attention(*x))


def test_empty_tensors_are_poisoned_here():
    for x in (torch.empty(3), torch.empty_like(torch.ones(2)), torch.ones(1).new_empty(2), torch.empty(2).bfloat16()):
        assert x.isnan().all()


def test_inputs_are_the_same_for_a_seed_and_layout_does_not_change_them():
    x, y, strided = make_inputs(T=5), make_inputs(T=5), make_inputs(T=5, strided=True)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(x, y, strided, strict=True))
    assert not strided.q1.is_contiguous()
    assert strided.q1.transpose(1, 2).is_contiguous()
    assert not torch.equal(x.q1, make_inputs(T=5, seed=1).q1)


def test_peak_memory_counts_what_is_held_at_once():
    mebibyte = 2**18  # fp32 values

    def one_after_another():
        for _ in range(4):
            torch.ones(mebibyte)

    def together():
        return [torch.ones(mebibyte) for _ in range(4)]

    assert peak_memory(one_after_another) == 2**20
    assert peak_memory(together) == 4 * 2**20
