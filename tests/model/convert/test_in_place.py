"""``convert --to diff_v2`` and ``--to diff`` for models that no layout holds: they keep their class."""

import json

import pytest
import torch
from architectures import tiny
from command_line import cli
from transformers import AutoModelForCausalLM

import diff_transformer
from diff_transformer.model.convert import convert_folder, convert_model

IDS = torch.tensor([[5, 9, 33, 71, 2, 8]])


@pytest.fixture
def saved(tmp_path):
    def save(name, **fields):
        folder = tmp_path / "source"
        tiny(name, **fields).save_pretrained(folder)
        return folder

    return save


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Qwen3", "diff_v2"), ("Qwen3-MoE", "diff"), ("Phi-3, Phi-4", "diff"), ("Llama with biases", "diff_v2")],
)
def test_the_logits_stay_and_the_source_too(saved, tmp_path, name, kind):
    source = saved(name)
    (source / "tokenizer.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("")
    before = contents(source)
    notes = convert_folder(source, tmp_path / "out", kind)
    assert contents(source) == before
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = AutoModelForCausalLM.from_pretrained(source)
    assert type(model) is type(expected)
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=4e-6)
    assert f"{type(model).__name__}, which stays" in notes[0]
    assert f"parameters: {expected.num_parameters():,} -> {model.num_parameters():,} (+" in notes[1]
    assert notes[2] == "carried over: tokenizer.json, generation_config.json, additional_chat_templates/tool_use.jinja"
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"# source with differential attention (`{kind}`" in card


def test_options_and_dtype(saved, tmp_path):
    convert_folder(saved("Qwen3"), tmp_path / "out", "diff", dtype="bfloat16", lambda_init=0.25)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    attention = model.model.layers[0].self_attn
    assert attention.differential_lambda.lambda_q1.dtype == torch.float32
    assert attention.differential_lambda().item() == pytest.approx(0.25)
    whole = AutoModelForCausalLM.from_pretrained(saved("Qwen3")).model.layers[0].self_attn.o_proj.weight
    assert torch.equal(attention.o_proj.weight, (whole / 0.75).bfloat16())  # rounded once


def test_the_command(saved, tmp_path):
    out = cli("convert", saved("Qwen3"), "--to", "diff_v2", "--out", tmp_path / "out")
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines()[-1] == f"model: {tmp_path / 'out'}"
    out = cli("convert", saved("Llama"), "--to", "dex", "--out", tmp_path / "dex")
    assert out.returncode == 0, out.stderr
    assert diff_transformer.fold(AutoModelForCausalLM.from_pretrained(tmp_path / "dex")).config.model_type == "llama"


def refused(folder, message, target="diff_v2", error=ValueError, **options):
    with pytest.raises(error, match=message):
        convert_folder(folder, folder.with_name("out"), target, **options)
    assert not folder.with_name("out").exists()


def test_refusals_come_before_the_weights_are_read(saved, tmp_path, monkeypatch):
    def never(*args, **options):
        raise AssertionError("the weights were read")

    monkeypatch.setattr("diff_transformer.model.convert.folder.read_model", never)
    refused(saved("gpt-oss"), r"GptOssForCausalLM is not taken: GptOssAttention has sinks beside its projections")
    refused(saved("Mamba 2"), "computes attention without transformers' AttentionInterface")
    source = saved("Qwen3")
    refused(source, "'diff_v2' has a start of its own", lambda_init=0.3)
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"model_type": "qwen99"}))
    refused(source, "transformers builds no causal language model of it")


def test_what_is_differential_already_stays(saved):
    source = saved("Llama")
    diff_transformer.differentiate(AutoModelForCausalLM.from_pretrained(source)).save_pretrained(source)
    refused(source, "LlamaForCausalLM is differential already")
    refused(source, "was made differential in place; it stays a 'llama' model", "diff-transformer")


FACTS = "base_model: source\nlicense: other\nlicense_name: ours\n"


@pytest.mark.parametrize("way", ["folder", "memory", "differentiated", "differentiated folder"])
def test_the_card_has_the_licence_and_the_name_of_the_source(tmp_path, way):
    in_place = way.startswith("differentiated")
    source = tiny("Qwen3" if in_place else "Llama")
    source.save_pretrained(tmp_path / "source")
    card = b"---\nlicense: other\nlicense_name: ours\ntags:\n- x\n---\n# \xe9\n"  # not UTF-8
    (tmp_path / "source" / "README.md").write_bytes(card)
    if "folder" in way:
        convert_folder(tmp_path / "source", tmp_path / "out", target="diff_v2")
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval()
        convert = diff_transformer.differentiate if in_place else convert_model
        convert(loaded, "diff_v2").save_pretrained(tmp_path / "out")
    assert f"---\nlibrary_name: transformers\n{FACTS}tags:\n" in (tmp_path / "out" / "README.md").read_text()
    if in_place:  # saved again, it still knows
        AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
        assert FACTS in (tmp_path / "again" / "README.md").read_text()
