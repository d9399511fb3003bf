"""Models are read from safetensors alone; what else there is, is refused in words."""

import json
import logging
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.data.tokenizer import byte_tokenizer, load_tokenizer
from diff_transformer.errors import UserError
from diff_transformer.evals.lm import load_lm
from diff_transformer.model.convert.checkpoint import Checkpoint
from diff_transformer.model.loading import load_model, read_model
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


@pytest.fixture
def reported():
    """What transformers says of its loading."""
    said, watch, logger = [], logging.Handler(), logging.getLogger("transformers.modeling_utils")
    watch.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(watch)
    yield said
    logger.removeHandler(watch)


def tokens():
    return torch.randint(0, 258, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt"])
@pytest.mark.parametrize("read", [read_model, load_lm])
def test_a_pickle_is_refused_unread(tmp_path, name, read):
    folder, sprung = tmp_path / "model", tmp_path / "sprung"
    save(folder)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(str(sprung))))
    with pytest.raises(ValueError, match=f"holds {name} but no .safetensors file.*a pickle can run code"):
        read(str(folder))
    assert not sprung.exists()


def test_an_index_may_name_safetensors_only(tmp_path):
    save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    (tmp_path / "shard.bin").write_bytes(pickle.dumps(Trap(str(tmp_path / "sprung"))))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "shard.bin"}}))
    with pytest.raises(ValueError, match=r"names shard\.bin"):
        read_model(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="is not an index of shards"):
        read_model(tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("where", ["../outside.safetensors", "/tmp/outside.safetensors", "a/../../outside.safetensors"])
def test_an_index_may_name_files_in_the_folder_only(tmp_path, where):
    folder = tmp_path / "model"
    save(folder)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": where}})
    )
    for read in (read_model, Checkpoint):
        with pytest.raises(ValueError, match=f"index.json names {re.escape(where)}, which is outside the folder"):
            read(folder)


@pytest.mark.parametrize("content", [b"[" * 10**5, b'{"a": "\xff"}', b"[1]", b""])
def test_settings_that_are_not_json_are_named(tmp_path, content):
    save(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json (is not JSON|holds a list)"):
        read_model(tmp_path)


def test_a_pickled_adapter_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds adapter_model\.bin"):
        read_model(tmp_path)


def test_shards_are_read(tmp_path):
    model = save(tmp_path / "whole", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(read_model(tmp_path / "shards").eval()(tokens()).logits, model(tokens()).logits)


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    save(tmp_path)
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    edit(tmp_path, num_hidden_layers=layers + 1)
    wanted = rf"not all of those that DiffTransformerForCausalLM has .*: \d+ missing: model\.layers\.{layers}\."
    for read in (read_model, load_lm):
        with pytest.raises(ValueError, match=wanted) as caught:
            read(str(tmp_path))
    assert re.search(r" and \d+ more\. They would be random; give a causal language model with", str(caught.value))


def test_weights_of_another_shape_are_named_with_both(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48)).save_pretrained(tmp_path)
    edit(tmp_path, intermediate_size=64)
    wanted = r"6 of another shape: model\.layers\.0\.mlp\.down_proj\.weight \(32, 48\) \(expected \(32, 64\)\), "
    with pytest.raises(ValueError, match=wanted):
        read_model(tmp_path)


def test_a_shard_that_is_lost_is_named(tmp_path):
    save(tmp_path).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    first, *others = sorted((tmp_path / "shards").glob("*.safetensors"))
    first.unlink()
    wanted = rf"lacks 1 of the {len(others) + 1} files its index names: {re.escape(first.name)}; copy or download"
    with pytest.raises(UserError, match=wanted):
        read_model(tmp_path / "shards")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder, index: save_file({"x": torch.zeros(1)}, folder / "model.safetensors"),
         "holds two sets of weights, model.safetensors and the shards of"),
        (lambda folder, index: index.write_text('{"weight_map": {"x": "model-00001-of-00002.safetensors"}}'),
         'index.json has no "metadata", which transformers needs'),
        (lambda folder, index: index.unlink(), r"holds model-00001-of-.*, but neither model\.safetensors nor"),
    ],
)  # fmt: skip
def test_conversion_and_loading_read_one_set_of_weights_or_refuse(tmp_path, change, message):
    """vllm-project/vllm issues 40765 and 19953."""
    save(tmp_path / "whole").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    change(tmp_path / "shards", tmp_path / "shards" / "model.safetensors.index.json")
    for read in (read_model, Checkpoint):
        with pytest.raises(UserError, match=message):
            read(tmp_path / "shards")


@pytest.mark.parametrize("where", ["message", "docs/conversion.md"])
def test_the_recipe_for_pickles_takes_tied_weights(tmp_path, monkeypatch, where):
    """safetensors issue 98: tensors that share memory are not saved."""
    model = save(tmp_path, tie_word_embeddings=True)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    if where == "message":
        with pytest.raises(ValueError, match="pickle") as refused:
            read_model(tmp_path)
        recipe = "import torch, safetensors.torch\n" + str(refused.value).partition("for bare tensors, ")[2]
        recipe = recipe.replace("FILE", "'model.pt'")
    else:
        page = Path(__file__).parents[2] / where
        recipe = re.search(r"```python\n(import torch, safetensors.*?)```", page.read_text(), re.S)[1]
    monkeypatch.chdir(tmp_path)
    exec(recipe)
    assert torch.equal(read_model(tmp_path).eval()(tokens()).logits, model(tokens()).logits)
    Checkpoint(tmp_path)


def test_a_shard_that_the_index_forgot_is_missed(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    lost = known["weight_map"]["lm_head.weight"]
    known["weight_map"] = {name: file for name, file in known["weight_map"].items() if file != lost}
    index.write_text(json.dumps(known))
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        read_model(tmp_path)


def test_a_model_without_its_head_is_refused(tmp_path):
    BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BertLMHeadModel has .* missing: cls\.predictions\.bias, "):
        read_model(tmp_path)


def test_what_the_checkpoint_has_besides_is_reported_and_no_error(tmp_path, reported):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48))
    state = {**model.state_dict(), "extra.weight": torch.zeros(1)}
    model.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read_model(tmp_path)
    assert any("extra.weight" in said for said in reported)


SMALL_GPT2 = GPT2Config(vocab_size=258, n_positions=64, n_embd=32, n_layer=2, n_head=2)
WHOLE = {
    **{f"ours {kind} tied={tied}": (kind, tied) for kind in ("diff", "softmax", "diff_v2") for tied in (False, True)},
    "gpt2": lambda: GPT2LMHeadModel(SMALL_GPT2),
    "gpt2 without a head, which is the embedding": lambda: GPT2Model(SMALL_GPT2),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64)),
    "diffllama": lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, intermediate_size=48)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48, tie_word_embeddings=True)),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_tied_weights_are_not_missing(tmp_path, kind):
    make = WHOLE[kind]
    if isinstance(make, tuple):
        model = save(tmp_path, make[0], tie_word_embeddings=make[1])
    else:
        model = make().eval()
        model.save_pretrained(tmp_path)
    state, read = model.state_dict(), read_model(tmp_path).state_dict()
    prefix = "" if next(iter(state)) in read else "transformer."
    assert all(torch.equal(value, read[prefix + name]) for name, value in state.items())


@pytest.mark.parametrize("kept", [5, -100])
def test_damaged_safetensors_are_named(tmp_path, kept):
    save(tmp_path / "whole").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    for folder, name in (("whole", "model.safetensors"), ("shards", "model-00002-of-")):
        path = next(path for path in (tmp_path / folder).glob("*.safetensors") if path.name.startswith(name))
        path.write_bytes(path.read_bytes()[:kept])
        wanted = (
            rf"{re.escape(str(tmp_path / folder))}.* cannot be read as safetensors \(.*\); copy or download it again"
        )
        for read in (read_model, lambda folder: Checkpoint(Path(folder))):
            with pytest.raises(ValueError, match=wanted):
                read(str(tmp_path / folder))


@pytest.mark.parametrize(
    "content", ["{}", "[]", "{", '{"added_tokens": []}', '{"added_tokens": [], "model": {"type": "Nothing"}}']
)
def test_a_damaged_tokenizer_is_refused(tmp_path, content):
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path))} has no tokenizer that can be read \(.+\); save"):
        load_model(str(tmp_path))
    with pytest.raises(ValueError, match=rf"no tokenizer at '{re.escape(str(tmp_path))}'"):
        load_tokenizer(tmp_path)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"holds no \.safetensors file"):
        read_model(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    for read in (read_model, Checkpoint):
        with pytest.raises(UserError, match=r"holds x\.safetensors, but neither model\.safetensors nor"):
            read(tmp_path)
    with pytest.raises(UserError, match="no model at"):
        load_model("./nowhere")
    with pytest.raises(UserError, match="no model called nobody/nothing"):
        load_model("nobody/nothing")
    save(tmp_path / "bare")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / file).unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_model(str(tmp_path / "bare"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; give float32, bfloat16, float16"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load_model("debug", **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_where_there_is_none():
    with pytest.raises(ValueError, match="finds no CUDA device here"):
        load_model("debug", device="cuda")


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "dffi"}, r"attention is 'dffi' \(did you mean 'diff'\?\)"),
        ({"attention": "grouped_diff"}, "do not make groups of 2 signal heads"),
        ({"head_norm": "no_weigth"}, "head_norm is 'no_weigth'"),
        ({"lambda_init": 1.0}, "lambda_init is 1.0"),
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


def test_auto_classes_know_a_configuration_made_by_hand():
    code = """from diff_transformer import DiffTransformerConfig
from transformers import AutoConfig, AutoModelForCausalLM
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
print(type(AutoModelForCausalLM.from_config(DiffTransformerConfig(**sizes))).__name__)
print(AutoConfig.for_model("diff_transformer", **sizes).num_diff_heads)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["DiffTransformerForCausalLM", "2"], done.stderr[-2000:]


def test_no_other_file_reads_weights():
    """``from_pretrained`` of a model is called in one place, and nothing unpickles but what a parent process sends."""
    import ast

    import diff_transformer

    root, found = Path(diff_transformer.__file__).parent, []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, method = ast.unparse(node.func.value), node.func.attr
            reads_weights = method == "from_pretrained" and not owner.endswith(("Config", "Tokenizer", "TokenizerFast"))
            unpickles = owner in ("pickle", "joblib", "dill") or ast.unparse(node.func) == "torch.load"
            careful = any(
                option.arg == "weights_only" and ast.unparse(option.value) == "True" for option in node.keywords
            )
            if (reads_weights or unpickles) and not careful:
                found.append(f"{path.relative_to(root)}: {ast.unparse(node.func)}")
    sent = [f"data/datatrove_tasks.py: dill.{name}" for name in ("dumps", "loads")]
    assert sorted(found) == [*sent, "model/loading.py: model_class.from_pretrained"]
