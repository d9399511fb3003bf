"""An exported checkpoint gives the same numbers where the package is absent, whatever the model consists of by then."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.inference.export import export
from diff_transformer.inference.export.flatten import _relative, flatten
from diff_transformer.model.config import ATTENTIONS
from diff_transformer.model.loading import read_model
from diff_transformer.model.modeling import DiffTransformerForSequenceClassification
from diff_transformer.model.presets import preset

CASES = {
    **{attention: {"attention": attention} for attention in ATTENTIONS},
    "grouped keys and a window": {"num_key_value_heads": 2, "sliding_window": 6},
    "no weight in the head norm": {"head_norm": "no_weight", "tie_word_embeddings": False},
}


def save(folder: Path, **fields) -> DiffTransformerForCausalLM:
    torch.manual_seed(0)
    config = preset("debug", vocab_size=258, embedding_initializer_range=1.0, **fields)
    model = DiffTransformerForCausalLM(config).eval()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Models by case, each with the folder of its export, all loaded in one process that lacks the package."""
    root = tmp_path_factory.mktemp("export")
    models = {case: save(root / str(i), **fields) for i, (case, fields) in enumerate(CASES.items())}
    folders = {case: root / f"exported{i}" for i, case in enumerate(CASES)}
    for i, folder in enumerate(folders.values()):
        export(str(root / str(i)), folder)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("load_exported.py"), *folders.values()],
        env={**os.environ, "HF_MODULES_CACHE": str(root / "modules"), "DIFF_TRANSFORMER_CACHE": str(root / "cache")},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {case: (models[case], folders[case]) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers_without_the_package(exported, case):
    model, folder = exported[case]
    outputs = torch.load(folder / "outputs.pt", weights_only=True)
    ids = torch.tensor([list(b"some text, and more")])
    torch.testing.assert_close(outputs["logits"], model(ids).logits, atol=1e-5, rtol=1e-5)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(outputs["tokens"], expected)
    assert torch.equal(outputs["static"], expected)
    model.train()(ids, labels=ids).loss.backward()
    torch.testing.assert_close(outputs["gradient"], next(iter(model.parameters())).grad, atol=1e-5, rtol=1e-4)
    model.eval()


def test_where_the_package_is_installed_its_own_class_loads_the_folder(exported):
    model, folder = exported["diff"]
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(loaded) is DiffTransformerForCausalLM
    ids = torch.tensor([list(b"some text")])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_folder_has_safetensors_and_no_pickle(exported):
    _, folder = exported["diff"]
    written = {path.name for path in folder.iterdir()} - {"outputs.pt"}
    assert {path.rpartition(".")[2] for path in written} == {"safetensors", "json", "py", "md"}
    assert 'from_pretrained("FOLDER", trust_remote_code=True)' in (folder / "README.md").read_text()
    assert json.loads((folder / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"].startswith("modeling_")


def test_no_exported_file_imports_the_package():
    files = flatten()
    for name, text in files.items():
        for node in ast.walk(ast.parse(text, name)):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "diff_transformer", (name, node.lineno)
                assert not node.level or node.module is None or f"{node.module}.py" in files, (name, node.module)
    assert "register(DiffTransformerConfig" not in files["modeling_diff_transformer.py"]


def test_what_cannot_be_exported_is_refused():
    with pytest.raises(ValueError, match="line 1: write `from diff_transformer"):
        _relative("diff_transformer.model.new", "import diff_transformer.ops.masking\n")
    with pytest.raises(ValueError, match="line 2 imports relatively"):
        _relative("diff_transformer.model.new", "x = 1\nfrom .heads import pair_heads\n")
    text, needed = _relative(
        "m", "def f():\n    from diff_transformer.model.heads import (\n        pair_heads,\n    )\n"
    )
    assert "    from .heads import pair_heads\n" in text
    assert needed == ["diff_transformer.model.heads"]


def test_a_folder_in_use_and_another_architecture_are_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        export("debug", tmp_path / "full")
    sizes = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="is a llama model"):
        export(str(tmp_path / "llama"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_in_memory(tmp_path):
    model = save(tmp_path / "model")
    export(model, tmp_path / "exported", tokenizer=byte_tokenizer())
    assert model.config.auto_map == {}
    export(str(tmp_path / "model"), tmp_path / "from_folder")
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.name != "tokenizer_config.json"}
        for name in ("exported", "from_folder")
    )
    assert ours == theirs
    with pytest.raises(ValueError, match=r"dtype='bfloat16' came with a model in memory; .* model\.to\(torch"):
        export(model, tmp_path / "again", dtype="bfloat16")


def test_what_is_read_from_an_export_and_saved_again_needs_the_package_and_says_so(tmp_path):
    export(DiffTransformerForCausalLM(preset("debug")), tmp_path / "out")
    read_model(tmp_path / "out").save_pretrained(tmp_path / "again")
    assert not json.loads((tmp_path / "again" / "config.json").read_text()).get("auto_map")
    assert "The folder contains the model's code" not in (tmp_path / "again" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]


def test_the_form_for_engines_is_of_language_models(tmp_path):
    with pytest.raises(ValueError, match="is a DiffTransformerForSequenceClassification; the form for engines holds"):
        export(DiffTransformerForSequenceClassification(preset("debug")), tmp_path / "out", for_engines=True)


def test_every_class_of_a_task_loads_its_own_code(tmp_path):
    config = preset("debug", num_labels=3)
    export(DiffTransformerForSequenceClassification(config), tmp_path / "exported")
    names = json.loads((tmp_path / "exported" / "config.json").read_text())["auto_map"]
    code = (tmp_path / "exported" / "modeling_diff_transformer.py").read_text()
    assert all(f"class {name.partition('.')[2]}(" in code for auto, name in names.items() if auto != "AutoConfig")
    assert "AutoModelForSequenceClassification.from_pretrained" in (tmp_path / "exported" / "README.md").read_text()


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    save(tmp_path / "model")
    with monkeypatch.context() as broken:
        broken.setattr("diff_transformer.inference.export.flatten", full)
        with pytest.raises(OSError, match="No space left"):
            export(str(tmp_path / "model"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    export(str(tmp_path / "model"), tmp_path / "out")
