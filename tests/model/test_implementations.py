"""transformers' ``attn_implementation`` on both sides of a pair."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model import cores
from diff_transformer.model.implementations import DEFAULT, IMPLEMENTATIONS
from diff_transformer.model.presets import preset

BOTH = pytest.mark.parametrize("attention", ["diff", "softmax"])
HERE = ["eager", "sdpa", "diff_auto", "diff_reference", "diff_blockwise", "diff_sdpa"]


def make(attention="diff", **fields):
    torch.manual_seed(0)
    fields = {"num_key_value_heads": 2, "initializer_range": 0.2, **fields}
    return DiffTransformerForCausalLM(preset("debug", attention=attention, **fields)).eval()


def padded():
    """Two rows of 12 tokens, the first with 4 of padding before it, and where there are tokens."""
    ids = torch.randint(0, 512, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    return ids, mask


def used_backends(model, monkeypatch, *arguments, **options):
    """The names with which one forward pass calls the operator."""
    called, attend = set(), cores.diff_attention

    def spy(*args, backend, **kwargs):
        called.add(backend)
        return attend(*args, backend=backend, **kwargs)

    monkeypatch.setattr(cores, "diff_attention", spy)
    model(*arguments, **options)
    monkeypatch.undo()
    return called


@BOTH
@pytest.mark.parametrize("window", [None, 5])
def test_every_implementation_gives_the_same_output(attention, window):
    model, (ids, mask) = make(attention, sliding_window=window), padded()
    there = mask.bool()
    with torch.no_grad():
        plain, with_padding = model(ids).logits, model(ids, attention_mask=mask).logits
        for name in HERE:
            model.set_attn_implementation(name)
            torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=1e-5)
            again = model(ids, attention_mask=mask).logits
            torch.testing.assert_close(again[there], with_padding[there], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["eager", "sdpa", "diff_blockwise", None])
def test_the_name_reaches_the_operator(name, tmp_path, monkeypatch):
    make().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert used_backends(model, monkeypatch, padded()[0]) == {IMPLEMENTATIONS[name or DEFAULT] or "auto"}
    assert model.config._attn_implementation == (name or DEFAULT)


def test_config_backend_decides_where_no_name_is_given(tmp_path, monkeypatch):
    model, ids = make(backend="sdpa"), padded()[0]
    assert used_backends(model, monkeypatch, ids) == {"sdpa"}
    model.set_attn_implementation("eager")
    assert used_backends(model, monkeypatch, ids) == {"reference"}
    model.set_attn_implementation(DEFAULT)
    assert used_backends(model, monkeypatch, ids) == {"sdpa"}
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)  # a choice of this process, not of the checkpoint
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert used_backends(loaded, monkeypatch, ids) == {"sdpa"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("spda", r"no attn_implementation 'spda' \(did you mean 'sdpa'\?\)"),
        ("diff_blockwize", r"did you mean 'diff_blockwise'"),
        ("vllm", "no attn_implementation 'vllm'; there are: diff_auto"),
    ],
)
def test_unknown_names_are_refused(name, message, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == DEFAULT
