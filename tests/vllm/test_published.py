"""DiffLlama and Motif as they were published: random weights in their names and shapes, without their remote code."""

import json

import pytest
import torch
from engine_models import SIZES, answers, build, expected, prompts
from motif import write_motif
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.model.convert import convert_folder

PAGE = 32
MOTIF = {"lambda_depth_offset": -1, "hidden_act": "poly_norm", "head_norm_eps": 1e-2}
CASES = {
    "Motif-2.6B": {"attention": "diff", **MOTIF},
    "Motif-2-12.7B": {"attention": "grouped_diff", "num_attention_heads": 8, **MOTIF},
}


@pytest.fixture
def diffllama(tmp_path):
    """``diffllama(**fields)`` -> the model of transformers and its folder, in several files."""

    def save(**fields):
        torch.manual_seed(0)
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        sizes = {name: SIZES[name] for name in (*names, "num_key_value_heads", "max_position_embeddings")}
        model = DiffLlamaForCausalLM(DiffLlamaConfig(**sizes, initializer_range=0.2, **fields)).eval()
        model.save_pretrained(tmp_path / "diffllama", max_shard_size="60KB")
        byte_tokenizer().save_pretrained(tmp_path / "diffllama")
        assert len(list((tmp_path / "diffllama").glob("*.safetensors"))) > 2
        return model, tmp_path / "diffllama"

    return save


@pytest.fixture
def motif(tmp_path):
    """``motif(**fields)`` -> our model and the folder that Motif's authors would publish of it."""

    def save(**fields):
        model, folder = build(tmp_path / "ours", **fields), tmp_path / "motif"
        write_motif(model, folder)
        byte_tokenizer().save_pretrained(folder)
        told = json.loads((folder / "config.json").read_text())
        auto_map = {"AutoConfig": "configuration_motif.MotifConfig", "AutoModelForCausalLM": "modeling_motif.Motif"}
        (folder / "config.json").write_text(json.dumps(told | {"model_type": "Motif", "auto_map": auto_map}))
        return model, folder

    return save


@pytest.mark.parametrize("tied", [False, True])
def test_diffllama_gives_the_tokens_of_transformers_and_of_what_convert_writes(tied, diffllama, start_engine, tmp_path):
    model, folder = diffllama(tie_word_embeddings=tied)
    rows = prompts(1, PAGE - 1, PAGE + 1, 150)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    got = answers(start_engine(folder, block_size=PAGE), rows)
    assert got == expected(model, rows)
    assert len(set().union(*got)) > 20
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()) == before
    convert_folder(folder, tmp_path / "converted")
    assert answers(start_engine(tmp_path / "converted", block_size=PAGE), rows) == got


@pytest.mark.parametrize("case", CASES)
def test_motif_gives_the_tokens_of_ours(case, motif, start_engine):
    model, folder = motif(**CASES[case])
    rows = prompts(1, PAGE - 1, PAGE + 1, 150)
    assert answers(start_engine(folder, block_size=PAGE), rows) == expected(model, rows)


def test_a_quantised_checkpoint_is_refused(diffllama, start_engine):
    _, folder = diffllama()
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"quantization_config": {"quant_method": "awq", "bits": 4}}))
    with pytest.raises(ValueError, match=r"has quantised weights \(awq\), .* serve the checkpoint that was quantised"):
        start_engine(folder)
