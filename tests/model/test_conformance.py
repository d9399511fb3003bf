"""Every variant of attention behaves as users of transformers expect of any model."""

import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.heads import ATTENTIONS
from diff_transformer.model.presets import preset

EVERY_VARIANT = pytest.mark.parametrize("attention", ATTENTIONS)


def model_of(attention: str, **fields) -> DiffTransformerForCausalLM:
    return DiffTransformerForCausalLM(preset("debug", attention=attention, **fields)).eval()


def tokens(length: int = 9, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 512, (batch, length))


@EVERY_VARIANT
@pytest.mark.parametrize("implementation", [None, "eager"])
def test_maps_are_returned_if_the_configuration_asks(attention, implementation, tmp_path):
    model_of(attention).save_pretrained(tmp_path / "plain")
    chosen = {} if implementation is None else {"attn_implementation": implementation}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_attentions=True, **chosen)
    maps = model(tokens()).attentions
    assert len(maps) == 2
    assert all(layer.shape[-2:] == (9, 9) for layer in maps)
    assert model(tokens(), output_attentions=False).attentions is None
    model.save_pretrained(tmp_path / "maps")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "maps")(tokens()).attentions is not None
    model.config.output_attentions = False
    assert model(tokens()).attentions is None


@pytest.mark.parametrize("attention", ["diff", "diff_v3", "gated"])
def test_early_exit_speculates_and_leaves_the_model_whole(attention):
    model, ids = model_of(attention), tokens(6, batch=1)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    found = model.generate(ids, max_new_tokens=8, do_sample=False, assistant_early_exit=1)
    assert torch.equal(found, expected)
    assert model.config.num_hidden_layers == 2


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


DYNAMIC = ({1: torch.export.Dim("length", min=2, max=64)},)


@pytest.mark.parametrize(
    "attention",
    ["diff", "softmax", "dint", *(pytest.param(k, marks=pytest.mark.slow) for k in ("diff_v2", "grouped_diff"))],
)
def test_a_program_exported_with_sdpa_is_portable(attention, tmp_path):
    model = Logits(model_of(attention, backend="sdpa"))
    program = torch.export.export(model, (tokens(16),), dynamic_shapes=DYNAMIC)
    assert not [node for node in program.graph.nodes if "diff_transformer" in str(node.target)]
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for length in (5, 23):
        ids = tokens(length)
        torch.testing.assert_close(loaded(ids), model(ids), rtol=1e-5, atol=1e-6)


@EVERY_VARIANT
def test_a_saved_model_says_how_to_load_it(attention, tmp_path):
    model = model_of(attention)
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    first = card.partition("\n# ")[2].splitlines()[2]
    assert first.startswith("It needs the package: `pip install diff-transformer`.")
    code = card.partition("```python\n")[2].partition("```")[0].replace("FOLDER", str(tmp_path))
    names: dict = {}
    exec(code, names)
    assert torch.equal(names["model"].lm_head.weight, model.lm_head.weight)
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def timm_layer() -> dict:
    """The names of examples/timm_layer.py."""
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "timm_layer.py"))


def test_the_wrapper_of_the_example_fits_other_models():
    wrapper = timm_layer()["Attention"]
    layer, x = wrapper(32, 4, proj_bias=False), torch.randn(1, 5, 32)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    assert layer(x).shape == x.shape
    causal = wrapper(32, 4, proj_bias=False, is_causal=True)
    causal.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x, attn_mask=seen), causal(x))
    torch.testing.assert_close(layer(x, is_causal=True), causal(x, is_causal=False))
    assert (layer(x) - causal(x)).abs().max() > 1e-3
    for given in ({"attn_drop": 0.1}, {"scale_norm": True}, {"qkv_bias": True, "proj_bias": False}):
        with pytest.raises(ValueError, match="no attn_drop and no scale_norm"):
            wrapper(32, 4, **{"proj_bias": False, **given})
    assert torch.nn.Sequential(layer, causal)(x).shape == x.shape
