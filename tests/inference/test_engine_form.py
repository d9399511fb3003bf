"""The form for inference engines: the same numbers through one call of transformers' attention interface a layer."""

import ast
import inspect
import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.inference.export import engine_config, engine_form, export
from diff_transformer.model.loading import load_model
from diff_transformer.model.presets import preset

CASES = {
    "diff": {"attention": "diff"},
    "softmax": {"attention": "softmax"},
    "diff_v2": {"attention": "diff_v2"},
    "grouped_diff": {"attention": "grouped_diff"},
    "grouped keys and a window": {"num_key_value_heads": 2, "sliding_window": 6},
    "no weight in the head norm": {"head_norm": "no_weight", "tie_word_embeddings": False},
    "no head norm, fixed lambda": {"head_norm": False, "lambda_learned": False},
    "lambda_init a constant": {"lambda_init": 0.3},
}


def save(folder, **fields):
    torch.manual_seed(0)
    config = preset("debug", vocab_size=258, embedding_initializer_range=1.0, initializer_range=0.1, **fields)
    model = DiffTransformerForCausalLM(config).eval()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers(case, tmp_path, monkeypatch):
    model = save(tmp_path / "model", **CASES[case])
    export(str(tmp_path / "model"), tmp_path / "out", for_engines=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert loaded.is_remote_code()
    ids = torch.tensor([list(b"some text, and more"), list(b"other text, as long")])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))
    loaded.set_attn_implementation("eager")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    base = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert base._supports_attention_backend


def test_the_configuration_has_the_geometry_of_the_call():
    config = engine_config(preset("3B"))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (24, 12, 256)
    config = engine_config(preset("3B", attention="diff_v2", num_key_value_heads=4))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (48, 4, 128)


def test_one_call_in_the_source():
    """Engines search the source of the attention's forward for this name."""
    tree = ast.parse(inspect.cleandoc(inspect.getsource(engine_form.Attention.forward)))
    calls = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert calls.count("attention_interface") == 1


def test_the_file_imports_nothing_of_the_package():
    text = inspect.getsource(engine_form)
    assert "import diff_transformer" not in text
    assert "from diff_transformer" not in text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention": "dint"}, "attention='dint'"),
        ({"value_head_dim": 8}, "value_head_dim=8"),
        ({"hidden_act": "poly_norm"}, "hidden_act='poly_norm'"),
        ({"attention": "softmax", "softmax_head_norm": True}, "softmax_head_norm=True"),
    ],
)
def test_what_it_cannot_hold_is_refused(fields, said, tmp_path):
    save(tmp_path / "model", **fields)
    with pytest.raises(ValueError, match=f"the form for engines cannot hold {said}; export without it"):
        export(str(tmp_path / "model"), tmp_path / "out", for_engines=True)
    assert not (tmp_path / "out").exists()


def test_the_weights_the_code_and_a_card(tmp_path):
    save(tmp_path / "model")
    export(str(tmp_path / "model"), tmp_path / "out", for_engines=True)
    kinds = {path.suffix for path in (tmp_path / "out").iterdir()}
    assert kinds == {".safetensors", ".json", ".py", ".md"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "diff_transformer_engine"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trust_remote_code=True" in card
    assert "import diff_transformer" not in card


def test_the_code_does_not_run_here_and_nobody_is_asked(tmp_path, monkeypatch):
    save(tmp_path / "model")
    export(str(tmp_path / "model"), tmp_path / "out", for_engines=True)
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("asked"))
    with pytest.raises(ValueError, match="out brings its own code, which does not run here; give the model that it"):
        load_model(str(tmp_path / "out"))
