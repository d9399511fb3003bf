"""Programs that tracers record compute what the model computes, or tracing is refused."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from diff_transformer import DiffAttention, diff_attention_decode
from diff_transformer.model.heads import ATTENTIONS
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.model.presets import preset

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")


class Logits(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.model = DiffTransformerForCausalLM(preset("debug", attention=attention)).eval()

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


class Layer(torch.nn.Module):
    def __init__(self, attention, **settings):
        super().__init__()
        self.layer = DiffAttention(32, 4, attention=attention, **settings).eval().requires_grad_(False)

    def forward(self, x):
        return self.layer(x)[0]


def tokens(length):
    return torch.randint(0, 512, (2, length))


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_traced_model(attention):
    model = Logits(attention)
    traced = torch.jit.trace(model, (tokens(8),), check_trace=False)
    for length in (8, 11):
        ids = tokens(length)
        torch.testing.assert_close(traced(ids), model(ids))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("attention", ATTENTIONS[:-1])
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_a_traced_layer(attention, length, backend):
    layer = Layer(attention, backend=backend)
    x, y = torch.randn(2, 2, length, 32)
    by_jit, by_fx = torch.jit.trace(layer, (x,), check_trace=False), make_fx(layer)(x)
    for traced in (by_jit, by_fx):
        torch.testing.assert_close(traced(y), layer(y))


@torch.no_grad()
def test_traced_decoding_reads_its_lengths():
    def attend(q, k, v, lengths):
        return diff_attention_decode(q, q, k, k, v, 0.3, lengths=lengths)

    q, k, v = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 16)
    traced = torch.jit.trace(attend, (q, k, v, torch.tensor([7, 7], dtype=torch.int32)), check_trace=False)
    lengths = torch.tensor([5, 1], dtype=torch.int32)
    torch.testing.assert_close(traced(q, k, v, lengths), attend(q, k, v, lengths))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_fake_tensors_go_through_with_a_mask(attention):
    with FakeTensorMode(), torch.no_grad():
        logits = Logits(attention)(tokens(8), torch.ones(2, 8, dtype=torch.long))
    assert isinstance(logits, FakeTensor)
    assert logits.shape == (2, 8, 512)
