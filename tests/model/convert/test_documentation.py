"""docs/conversion.md names every layout, and its code runs."""

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import diff_transformer.model.convert as convert
from diff_transformer.model.convert.folder import LAYOUTS, TARGETS

PAGE = Path(__file__).parents[3] / "docs" / "conversion.md"


def test_the_table_has_every_layout_and_no_other():
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE.read_text(), re.MULTILINE) == list(LAYOUTS)
    for target in TARGETS:
        assert f"`{target}`" in PAGE.read_text() or f"--to {target}`" in PAGE.read_text()


def test_its_recipe_makes_safetensors_of_a_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4))  # fmt: skip
    torch.save(model.state_dict(), "model.pt")
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be loaded"):
        convert.convert_folder(tmp_path, tmp_path / "ours")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(next(block for block in blocks if "torch.load" in block), {})
    convert.convert_folder(tmp_path, tmp_path / "ours")
    assert (tmp_path / "ours" / "model.safetensors").exists()
