"""What is not a checkpoint of a known layout is named and refused, and nothing is left behind."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from diff_transformer.durable import DiskError
from diff_transformer.errors import UserError
from diff_transformer.model.convert import checkpoint as writing
from diff_transformer.model.convert import convert_folder, layout_of
from diff_transformer.model.convert.checkpoint import Checkpoint

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8}


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def refused(folder, message, error=ValueError, **options):
    """The message is raised, and the folder's parent holds what it held."""
    before = sorted(path.name for path in folder.parent.iterdir())
    with pytest.raises(error) as caught:
        convert_folder(folder, folder.with_name("out"), **options)
    assert message in str(caught.value)
    assert sorted(path.name for path in folder.parent.iterdir()) == before


def edit(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_another_model_is_named(tmp_path):
    Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=4)).save_pretrained(tmp_path / "qwen")
    refused(tmp_path / "qwen", "is a 'qwen2' model (Qwen2ForCausalLM); accepted: diff-transformer (this package's")


def test_tensors_that_belong_to_nothing_known_are_shown(save):
    folder = save("odd", {"encoder.weight": torch.zeros(2), "decoder.weight": torch.zeros(2)})
    refused(folder, "is of no known layout; it has tensors such as decoder.weight, encoder.weight; accepted: ")


def test_without_config_the_names_tell(make, save):
    tensors = dict(make().state_dict())
    assert layout_of(Checkpoint(save("ours", tensors))) == "diff-transformer"
    theirs = {name.replace("core.lam.", ""): x for name, x in tensors.items() if "head_norm" not in name}
    assert layout_of(Checkpoint(save("theirs", theirs))) == "diffllama"
    motif = {name.replace("core.lam.", "").replace("core.head_norm", "subln"): x for name, x in tensors.items()}
    assert layout_of(Checkpoint(save("motif", motif))) == "motif"
    softmax = {name: x for name, x in tensors.items() if ".core." not in name}
    folder = save("llama", softmax)
    assert layout_of(Checkpoint(folder)) == "llama"
    refused(folder, "has the tensors of a Llama-family softmax model, but no config.json", UserError)


def test_a_wrong_from_is_corrected(llama):
    refused(llama, "is a Llama-family softmax model, not Hugging Face DiffLlama; give --from llama", origin="diffllama")


def test_unknown_names_of_layouts(llama):
    refused(llama, "cannot convert from 'gpt' to 'diff-transformer'; accepted: from diff-transformer or ", origin="gpt")
    refused(llama, "cannot convert from 'llama' to 'onnx'; accepted: ", origin="llama", target="onnx")
    refused(llama, "cannot convert to 'unilm'", target="unilm")
    refused(llama, "is in the layout 'llama' already; give another --to: diff-transformer, ", target="llama")
    refused(llama, "dtype is 'int8'; accepted: float32", dtype="int8")
    refused(llama, "window: not for a conversion from 'llama' to 'diff-transformer'", window=3)


def test_config_and_tensors_that_disagree(llama):
    edit(llama, model_type="diffllama", architectures=["DiffLlamaForCausalLM"])
    refused(llama, "by their names they are a Llama-family softmax model")
    refused(llama, "12 missing: model.layers.0.self_attn.lambda_q1, ")
    refused(llama, " and 4 more")


def test_sizes_that_disagree_are_listed_with_both(llama):
    edit(llama, intermediate_size=64)
    refused(llama, "9 of another shape: model.layers.0.mlp.gate_proj.weight (48, 32) (expected (64, 32)), ")


def test_missing_and_extra_tensors_are_listed_together(llama, save):
    state = Checkpoint(llama)
    tensors = {name: state.tensor(name) for name in state.shapes()} | {"extra.one": torch.zeros(1)}
    for i in range(3):
        del tensors[f"model.layers.{i}.self_attn.q_proj.weight"]
    folder = save("broken", tensors, **{"config.json": json.loads((llama / "config.json").read_text())})
    refused(folder, "3 missing: model.layers.0.self_attn.q_proj.weight, model.layers.1.self_attn.q_proj.weight, ")
    refused(folder, "1 not known: extra.one")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_a_pickle_is_refused_with_what_to_do(tmp_path, name):
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    torch.save({"model.norm.weight": torch.zeros(2)}, folder / name)
    refused(folder, f"holds {name} but no .safetensors file. Only safetensors are read")


def test_a_pickle_beside_safetensors_is_never_opened(llama, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save(Bomb(), llama / "pytorch_model.bin")
    convert_folder(llama, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_folders_that_hold_no_model(tmp_path):
    refused(tmp_path / "nowhere", "is not a folder; give the folder of a saved model", UserError)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "holds no .safetensors file", UserError)


def test_a_file_that_is_cut_short(llama):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(llama, "model.safetensors cannot be read as safetensors (")


def test_a_shard_that_is_missing(tmp_path):
    folder = tmp_path / "llama"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size="20KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    refused(folder, f"files its index names: {lost.name}", UserError)


def test_a_tensor_in_two_files(llama):
    (llama / "model.safetensors").rename(llama / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(32)}, llama / "b.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "a.safetensors", "x": "b.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(llama, "model.norm.weight is in a.safetensors and in b.safetensors")


def test_settings_that_are_not_json(llama):
    (llama / "config.json").write_text("{model_type: llama}")
    refused(llama, "config.json is not JSON (")
    (llama / "config.json").write_text("[1]")
    refused(llama, "config.json holds a list; expected a JSON object")


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "big"},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"rope_parameters": {"rope_type": "odd"}},
    ],
)
def test_settings_that_are_no_model(llama, fields):
    edit(llama, **fields)
    refused(llama, "config.json does not describe a Llama-family softmax model: ")


def test_a_quantised_checkpoint(llama, save):
    state = Checkpoint(llama)
    tensors = {name: state.tensor(name) for name in state.shapes()}
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(48, 32, dtype=torch.int8)
    folder = save("int8", tensors, **{"config.json": json.loads((llama / "config.json").read_text())})
    refused(folder, "holds 1 tensors that are not fp64, fp32, fp16 or bf16: model.layers.0.mlp.up_proj.weight (I8)")


def test_an_out_folder_that_is_not_empty_is_left_alone(llama, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    refused(llama, "out is not empty; choose another folder", UserError)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    convert_folder(llama, out)
    assert (out / "model.safetensors").exists()


def test_an_out_that_is_a_file_is_left_alone(llama, tmp_path):
    (tmp_path / "out").write_text("kept")
    refused(llama, "out is a file; choose a folder", UserError)
    assert (tmp_path / "out").read_text() == "kept"


def test_an_out_that_may_not_be_made_is_said_before_anything_is_read(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # no rights bind root
    refused(llama, f"{tmp_path} may not be written to; choose another --out", DiskError)


def test_a_folder_filled_meanwhile_is_left_alone(llama, tmp_path):
    def fill(done, total):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs").write_text("kept")

    with pytest.raises(UserError, match="not empty"):
        convert_folder(llama, tmp_path / "out", progress=fill)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_nothing(llama, tmp_path, monkeypatch, error):
    written = []

    def interrupted(tensors, path, **options):
        save_file(tensors, path, **options)
        written.append(path)
        if len(written) == 2:
            raise error

    monkeypatch.setattr(writing, "save_file", interrupted)
    with pytest.raises(error):
        convert_folder(llama, tmp_path / "out", shard_bytes=20_000)
    assert len(written) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


def test_while_writing_there_is_no_out_folder(llama, tmp_path):
    seen = []

    def look(done, total):
        seen.append((done / total, (tmp_path / "out").exists()))

    convert_folder(llama, tmp_path / "out", progress=look)
    assert not any(exists for _, exists in seen)
    assert [share for share, _ in seen] == sorted(share for share, _ in seen)
    assert seen[-1][0] == 1.0


def test_a_header_that_promises_too_much(llama):
    (llama / "model.safetensors").write_bytes(struct.pack("<Q", 10**12) + b"{}")
    refused(llama, "model.safetensors cannot be read as safetensors (")


def test_a_disk_that_is_full(llama, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused(llama, "the converted model needs ", OSError)


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
