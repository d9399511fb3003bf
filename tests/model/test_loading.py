"""Models are read from safetensors alone; what else there is, is refused in words."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.errors import UserError
from diff_transformer.evals.lm import load_lm
from diff_transformer.model.loading import load_model, model_path, read_model, read_settings
from diff_transformer.model.presets import preset
from diff_transformer.testing import assert_within_budget


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def save(folder, attention="diff", **fields):
    torch.manual_seed(0)
    config = preset("debug", vocab_size=258, attention=attention, embedding_initializer_range=1.0, **fields)
    model = DiffTransformerForCausalLM(config).eval()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


SIZES = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def edit(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def tokens():
    return torch.randint(0, 258, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("read", [read_model, load_lm])
def test_a_pickle_is_refused_unread(tmp_path, read):
    folder, sprung = tmp_path / "model", tmp_path / "sprung"
    save(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(str(sprung))))
    with pytest.raises(ValueError, match=r"cannot be loaded: .*only safetensors are read"):
        read(str(folder))
    assert not sprung.exists()


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    save(tmp_path)
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    edit(tmp_path, num_hidden_layers=layers + 1)
    for read in (read_model, load_lm):
        with pytest.raises(UserError, match=rf"\d+ missing: model\.layers\.{layers}\..* and \d+ more"):
            read(str(tmp_path))
    edit(tmp_path, num_hidden_layers=layers, intermediate_size=48)
    with pytest.raises(UserError, match=r"6 of another shape: model\.layers\.0\.mlp\.down_proj\.weight \(32, "):
        read_model(tmp_path)


def test_the_folder_of_a_run_is_that_of_its_model(tmp_path):
    model = save(tmp_path / "model")
    loaded, _ = load_model(str(tmp_path))
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    assert model_path(str(tmp_path)) == str(tmp_path / "model")


def test_what_is_missing_or_damaged_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"cannot be loaded: Unrecognized model .* in its config.json.$"):
        read_model(tmp_path)
    for name, reason in (("runs/seed0/model", "there is no such folder$"), ("nobody/nothing", "We couldn't connect")):
        with pytest.raises(UserError, match=f"{name} cannot be loaded: {reason}"):
            load_model(name)
    with pytest.raises(UserError, match=r"debg cannot be loaded: .* \(did you mean 'debug'\?\)$"):
        load_model("debg")
    with pytest.raises(UserError, match="no dtype 'int8'"):
        load_model("debug", dtype="int8")
    save(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer that can be read"):
        load_model(str(tmp_path / "model"))
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "llama")
    edited, settings = tmp_path / "llama" / "config.json", read_settings(tmp_path / "llama")
    for name, value, reason in (("num_attention_heads", 7, "is not a multiple of"), ("num_hidden_layers", "4", "int")):
        edited.write_text(json.dumps(settings | {name: value}))
        with pytest.raises(UserError, match=f"llama cannot be loaded: .*{reason}"):
            read_model(tmp_path / "llama")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be loaded"):
        read_model(tmp_path / "model")


@pytest.mark.parametrize(
    "make",
    [
        lambda **tied: DiffTransformerForCausalLM(preset("debug", **tied)),
        lambda **tied: DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, intermediate_size=48, **tied)),
        lambda **tied: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48, **tied)),
    ],
)
def test_tied_weights_are_not_missing(tmp_path, make):
    model = make(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    state, read = model.state_dict(), read_model(tmp_path).state_dict()
    assert all(torch.equal(value, read[name]) for name, value in state.items())


@pytest.mark.parametrize("attention", ["diff", "diff_v2", "softmax"])
def test_bf16_weights(tmp_path, attention):
    """bf16 activations double the error of the weights' rounding at most: twice the error of rounded weights in fp32,
    and the rounding of every layer's output."""
    model = save(tmp_path, attention)
    exact = model.double()(tokens()).logits
    loaded, _ = load_model(str(tmp_path), dtype="bfloat16", device="cpu")
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    eager, _ = load_model(str(tmp_path), dtype="bfloat16", device="cpu")
    eager.set_attn_implementation("eager")
    assert_within_budget(loaded(tokens()).logits, exact, eager(tokens()).logits)
    assert loaded.get_memory_footprint() == pytest.approx(model.float().get_memory_footprint() / 2, rel=0.02)
    loaded.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu")[0].dtype == torch.float32  # half precision is slow there


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "dffi"}, r"no attention 'dffi' \(did you mean 'diff'\?\)"),
        ({"attention": "grouped_diff"}, "do not make groups of 2 signal heads"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_fields_given_on_loading_are_checked(fields, message, tmp_path):
    save(tmp_path, signal_heads_per_noise_head=2)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, **fields)


@pytest.mark.parametrize(
    "imports",
    [
        "import diff_transformer\nfrom transformers import AutoConfig, AutoModel, AutoModelForCausalLM",
        pytest.param(
            "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM\nimport diff_transformer",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_auto_classes_know_the_models_after_the_bare_import(imports, tmp_path):
    """In either order, in a process that has loaded nothing else of the package."""
    save(tmp_path)
    code = f"""{imports}
import sys
assert "diff_transformer.model.modeling" not in sys.modules
print(type(AutoConfig.from_pretrained({str(tmp_path)!r})).__name__)
print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__name__)
print(type(AutoModel.from_pretrained({str(tmp_path)!r})).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    names = ["DiffTransformerConfig", "DiffTransformerForCausalLM", "DiffTransformerModel"]
    assert done.stdout.split() == names, done.stderr[-2000:]


def test_a_folder_opens_where_nothing_imports_the_package(tmp_path):
    """With ``trust_remote_code``, by the file that imports the package; saved again, it is no copy of the package."""
    model = save(tmp_path / "model")
    assert len((tmp_path / "model" / "diff_transformer_code.py").read_text().splitlines()) <= 12
    assert "auto_map" not in vars(model.config)
    code = f"""import torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.set_num_threads({torch.get_num_threads()})
loaded = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True)
assert AutoConfig.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True).num_diff_heads == 2
loaded.save_pretrained({str(tmp_path / "again")!r})
torch.save(loaded(torch.arange(9)[None]).logits, {str(tmp_path / "logits")!r})
"""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr[-2000:]
    assert torch.equal(torch.load(tmp_path / "logits"), model(torch.arange(9)[None]).logits)
    files = ({path.name for path in (tmp_path / name).iterdir()} - {"README.md"} for name in ("model", "again"))
    before, after = files
    assert before - after == {"tokenizer.json", "tokenizer_config.json"}
    assert not after - before
    assert torch.equal(read_model(tmp_path / "again").eval()(tokens()).logits, model(tokens()).logits)
