"""Memory of differential attention grows with the length alone, also with padding and packed documents."""

import pytest
import torch

from diff_transformer.model.heads import ATTENTIONS, CORES
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.model.presets import preset
from diff_transformer.ops.cpu.library import available
from diff_transformer.ops.masking import fully_masked_rows, position_mask
from diff_transformer.testing import peak_memory

N, PADDING = 6000, 99


def padded(model, ids, mask):
    model(ids, attention_mask=mask, logits_to_keep=1)


def packed(model, ids, mask):
    half = torch.arange(N // 2)[None]
    model(ids, position_ids=torch.cat((half, half), 1), logits_to_keep=1)


def chunks(model, ids, mask):
    first = model(ids[:, : N // 2], attention_mask=mask[:, : N // 2], logits_to_keep=1)
    model(ids[:, N // 2 :], attention_mask=mask, past_key_values=first.past_key_values, logits_to_keep=1)


def generate(model, ids, mask):
    model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, pad_token_id=0)


@pytest.mark.skipif(not available(), reason="the CPU kernel is not built on this machine")
@torch.no_grad()
@pytest.mark.parametrize("attention", [kind for kind in ATTENTIONS if CORES[kind].maps == 2])
@pytest.mark.parametrize("call", [padded, packed, chunks, generate], ids=lambda call: call.__name__)
@pytest.mark.parametrize("window", [None, 300])
def test_no_memory_grows_with_the_square_of_the_length(call, attention, window):
    if attention == "dint" and (window or call is chunks):
        pytest.skip("dint has neither window nor cache")
    fields = {"max_position_embeddings": N + 8, "sliding_window": window}
    model = DiffTransformerForCausalLM(preset("debug", attention=attention, **fields)).eval()
    mask = torch.ones(1, N, dtype=torch.long)
    mask[0, :PADDING] = 0
    ids = torch.randint(0, 512, (1, N))
    assert peak_memory(lambda: call(model, ids, mask)) < N * N


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 7), (9, 7), (1, 7)])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_fully_masked_rows_of_a_mask_of_keys(queries, keys, window):
    device = torch.device("cpu")
    for mask in (
        torch.rand(2, 1, 1, keys) < 0.4,
        torch.rand(1, 3, 1, keys) < 0.4,
        torch.tensor(False).expand(1, 1, 1, 1),
    ):
        seen = position_mask(queries, keys, True, window, device)
        seen = torch.ones(queries, keys, dtype=torch.bool) if seen is None else seen
        expected = ~(seen & mask).any(-1, keepdim=True)
        for given in (mask, torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))):
            assert torch.equal(fully_masked_rows(queries, keys, True, window, given, device), expected)
