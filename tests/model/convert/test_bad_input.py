"""Folders without a checkpoint of a known layout are refused in words, and nothing is left behind."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from diff_transformer.errors import UserError
from diff_transformer.model.convert import convert_folder

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8}
LOST = {f"model.layers.{i}.self_attn.q_proj.weight": None for i in range(3)}


@pytest.fixture
def llama(tmp_path):
    place = tmp_path / "llama"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(place, max_shard_size="20KB")
    return place


def refused(source, message, error=UserError, **options):
    """The message is raised, and the folder's parent holds what it held."""
    before = sorted(path.name for path in source.parent.iterdir())
    with pytest.raises(error, match=message):
        convert_folder(source, source.with_name("out"), **options)
    assert sorted(path.name for path in source.parent.iterdir()) == before


def edit(source, **fields):
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_another_model_is_named(tmp_path):
    Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=4)).save_pretrained(tmp_path / "qwen")
    refused(tmp_path / "qwen", r"is a 'qwen2' model; accepted: diff-transformer \(this package's")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "unilm"}, "no target 'unilm'; there are: diff-transformer, llama"),
        ({"target": "llama"}, "is in the layout 'llama' already; give another --to"),
        ({"dtype": "int8"}, "no dtype 'int8'; there are: float32"),
        ({"target": "diff_v2", "lambda_init": 0.3}, "'diff_v2' has a start of its own"),
        ({"lambda_init": 0.3}, "lambda_init is 0.3, which only the target 'diff' has"),
    ],
)
def test_wrong_names(llama, options, message):
    refused(llama, message, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (LOST, r"3 missing: model\.layers\.0\.self_attn\.q_proj"),
        ({"model.norm.weight": torch.ones(8)}, r"1 of another shape: model.norm.weight \(8,\), not \(32,\)"),
    ],
)
def test_other_tensors(llama, save, changes, message):
    tensors = {name: x for path in llama.glob("*.safetensors") for name, x in load_file(path).items()} | changes
    settings = json.loads((llama / "config.json").read_text())
    source = save("other", {name: x for name, x in tensors.items() if x is not None}, **{"config.json": settings})
    refused(source, message)


def test_folders_that_hold_no_model(llama, tmp_path):
    refused(tmp_path / "nowhere", "has no config.json; give the folder of a saved model")
    with pytest.raises(UserError, match=f"{Path.home()}/nowhere has no config.json"):
        convert_folder("~/nowhere", tmp_path / "out")
    first, second, *_ = sorted(llama.glob("*.safetensors"))
    second.write_bytes(second.read_bytes()[:-100])
    refused(llama, "cannot be loaded")
    first.unlink()
    refused(llama, "cannot be loaded")
    (llama / "config.json").write_text("[1")
    refused(llama, "config.json is not JSON")


def test_nothing_is_overwritten(llama, tmp_path):
    out = tmp_path / "out"
    out.write_text("kept")
    refused(llama, "out exists already; choose a new folder")
    out.unlink()
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    refused(llama, "out exists already; choose a new folder")
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    convert_folder(llama, out)
    assert (out / "model.safetensors").exists()


def test_tokenizer_generation_settings_and_licence_are_carried_byte_for_byte(llama, tmp_path):
    files = {
        "tokenizer.json": '{"version": "1.0"}', "tokenizer_config.json": "{}", "merges.txt": "a b\n", "LICENSE": "MIT",
        "chat_template.jinja": "{{ messages }}", "generation_config.json": '{"temperature": 0.3}',
    }  # fmt: skip
    for name, text in files.items():
        (llama / name).write_text(text)
    (llama / "modeling_other.py").write_text("raise SystemExit")
    notes = convert_folder(llama, tmp_path / "out")
    for name, text in files.items():
        assert (tmp_path / "out" / name).read_text() == text
    assert not (tmp_path / "out" / "modeling_other.py").exists()
    assert any("carried over: tokenizer.json" in note for note in notes)
