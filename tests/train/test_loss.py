"""The loss: weights of tokens, and the chunked cross-entropy against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from diff_transformer.errors import UserError
from diff_transformer.train.loss import Objective, count_by_source, token_weights, weighted_cross_entropy

N, D, V = 37, 12, 101


def inputs(dtype=torch.float64):
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    head = torch.randn(V, D, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, V, (N,))
    targets[::5] = -100
    return hidden, head, targets, torch.rand(N, dtype=torch.float64)


def plain(hidden, head, targets, weights):
    losses = F.cross_entropy(
        F.linear(hidden, head).to(torch.promote_types(hidden.dtype, torch.float32)), targets, reduction="none"
    )
    return (losses * weights).sum(), losses


@pytest.mark.parametrize("chunk", [None, 1, 8, 37, 1000])
def test_equal_to_the_plain_loss_with_every_gradient(chunk):
    hidden, head, targets, weights = inputs()
    expected, losses = plain(hidden, head, targets, weights)
    wanted = torch.autograd.grad(3 * expected, (hidden, head))
    got, each = weighted_cross_entropy(hidden, head, targets, weights, chunk=chunk)
    found = torch.autograd.grad(3 * got, (hidden, head))
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(each, losses.detach(), rtol=1e-12, atol=1e-13)
    for actual, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-13)


def test_bf16_autocast_is_as_near_as_the_plain_loss():
    hidden, head, targets, weights = inputs(torch.float32)
    exact = torch.autograd.grad(plain(hidden.double(), head.double(), targets, weights)[0], (hidden, head))
    with torch.autocast("cpu", torch.bfloat16):
        eager = torch.autograd.grad(plain(hidden, head, targets, weights)[0], (hidden, head))
        loss, _ = weighted_cross_entropy(hidden, head, targets, weights.float(), chunk=8)
    chunked = torch.autograd.grad(loss, (hidden, head))
    for one, other, right in zip(chunked, eager, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - right).abs().max() <= 2 * (other - right).abs().max() + 2**-8 * right.abs().max()


def test_weights_in_bf16():
    hidden, head, targets, weights = inputs(torch.bfloat16)
    loss, _ = weighted_cross_entropy(hidden, head, targets, weights, chunk=8)
    d_hidden, d_head = torch.autograd.grad(loss, (hidden, head))
    assert (loss.dtype, d_hidden.dtype, d_head.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    exact = plain(hidden.double(), head.double(), targets, weights)[0]
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)


class Largest(TorchDispatchMode):
    """The size in elements of the largest tensor that an operation allocated; views do not count."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize(("chunk", "largest"), [(None, 512 * 1000), (64, 64 * 1000)])
def test_logits_are_never_whole(chunk, largest):
    hidden, head = torch.randn(512, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    with Largest() as seen:
        loss, _ = weighted_cross_entropy(hidden, head, torch.randint(0, 1000, (512,)), torch.ones(512), chunk=chunk)
        loss.backward()
    assert seen.elements == largest


def test_no_gradient_is_computed_where_none_is_asked_for():
    hidden, head, targets, weights = inputs(torch.float32)
    with torch.no_grad(), Largest() as seen:
        loss, _ = weighted_cross_entropy(hidden, head, targets, weights, chunk=2)
    assert not loss.requires_grad
    assert seen.elements == 2 * V  # neither [N, D] nor [V, D] was made


def test_a_second_backward_is_refused():
    hidden, head, targets, weights = inputs()
    loss, _ = weighted_cross_entropy(hidden, head, targets, weights, chunk=8)
    loss.backward(retain_graph=True)
    with pytest.raises(UserError, match="can be taken once; compute the loss again"):
        loss.backward()


@pytest.mark.parametrize("few", [True, False], ids=["few labels", "many labels"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_objective_is_the_same_in_chunks(tied, few):
    from diff_transformer import DiffTransformerForCausalLM
    from diff_transformer.model.presets import preset

    model = DiffTransformerForCausalLM(preset("debug", tie_word_embeddings=tied)).double().train()
    ids = torch.randint(0, 512, (3, 17))
    labels, weights = ids.masked_fill((ids % 7 == 0) != few, -100), torch.rand(3, 16, dtype=torch.float64)
    gradients = []
    for chunk in (0, 5):
        model.zero_grad(set_to_none=True)
        loss, rows = Objective(model, chunk)({"input_ids": ids}, labels[:, 1:], weights)
        loss.backward()
        gradients.append([loss.detach(), rows, *(p.grad for p in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    assert rows.shape == (3,)


LABELS = torch.tensor([[1, 2, 3, 4, 5], [-100, 2, 3, 4, 5], [-100, -100, -100, -100, 7]])
SOURCE = torch.tensor([0, 0, 1])
SHARES = [3.0, 1.0]


def test_counts():
    assert count_by_source(LABELS, SOURCE, 3).tolist() == [8, 1, 0]


def test_tokens_weigh_the_same():
    weights = token_weights(LABELS, SOURCE, torch.tensor([8.0, 1.0]), SHARES, "tokens")
    assert weights.shape == (3, 4)
    assert weights.sum().item() == pytest.approx(1)
    assert weights[weights > 0].tolist() == pytest.approx([1 / 9] * 9)
    assert (weights[2] > 0).tolist() == [False, False, False, True]


def test_sources_weigh_their_share():
    weights = token_weights(LABELS, SOURCE, torch.tensor([8.0, 1.0]), SHARES, "sources")
    assert weights[:2].sum().item() == pytest.approx(0.75)
    assert weights[2].tolist() == pytest.approx([0, 0, 0, 0.25])


def test_a_source_without_a_predicted_token_leaves_its_share_to_the_others():
    labels = torch.cat([LABELS[:2], torch.full((1, 5), -100)])
    weights = token_weights(labels, SOURCE, torch.tensor([8.0, 0.0]), SHARES, "sources")
    assert weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("loss", ["tokens", "sources"])
def test_parts_of_a_batch_weigh_what_they_weigh_in_the_whole(loss):
    counts = count_by_source(LABELS, SOURCE, 2)
    whole = token_weights(LABELS, SOURCE, counts, SHARES, loss)
    parts = [token_weights(LABELS[i:j], SOURCE[i:j], counts, SHARES, loss) for i, j in ((0, 1), (1, 3))]
    assert torch.equal(torch.cat(parts), whole)
