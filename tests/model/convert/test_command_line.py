"""``diff-transformer convert`` as a user types it."""

import sys

import pytest
import torch
from transformers import DiffLlamaForCausalLM

from diff_transformer.cli import main


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run the command line here: ``(exit status, stdout, stderr)``."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["diff-transformer", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return ended.value.code or 0, told.out, told.err

    return run


def test_ours_to_diffllama_says_what_it_did(cli, make, ids, tmp_path):
    ours = make()
    ours.save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer.json").write_text("{}")
    status, told, error = cli("convert", tmp_path / "ours", "--to", "diffllama", "--out", tmp_path / "theirs")
    assert status == 0, error
    found, folded, carried, model = told.splitlines()
    assert found == f"{tmp_path / 'ours'}: this package's layout"
    assert "folded into W_O" in folded
    assert carried == "carried over: tokenizer.json, generation_config.json"
    assert model == f"model: {tmp_path / 'theirs'}"
    theirs = DiffLlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, atol=1e-4, rtol=1e-4)


def test_options_reach_the_conversion(cli, make, tmp_path):
    make(num_key_value_heads=2).save_pretrained(tmp_path / "ours")
    out = ("--out", tmp_path / "theirs")
    status, _, _ = cli("convert", tmp_path / "ours", "--to", "diffllama", "--dtype", "bfloat16", *out)
    assert status == 0
    assert DiffLlamaForCausalLM.from_pretrained(tmp_path / "theirs").dtype == torch.bfloat16
    naive = ("--from", "diff-transformer", "--to", "authors", "--naive-grouped-query", "--out", tmp_path / "naive")
    status, _, error = cli("convert", tmp_path / "ours", *naive)
    assert status == 2
    assert "error: the naive grouped-query file cannot hold 1 key/value pairs for 4 differential heads" in error


def test_a_refusal_is_one_message(cli, save, tmp_path):
    folder = save("other", {"a": torch.zeros(1)}, **{"config.json": {"model_type": "mamba"}})
    status, _, error = cli("convert", folder, "--out", tmp_path / "out")
    assert status == 2
    assert error.startswith(f"error: {folder} is a 'mamba' model; accepted: ")
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()
