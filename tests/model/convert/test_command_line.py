"""``diff-transformer convert`` as a user types it."""

import torch
from command_line import cli
from transformers import DiffLlamaForCausalLM


def test_ours_to_diffllama_says_what_it_did(make, ids, tmp_path):
    ours = make()
    ours.save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer.json").write_text("{}")
    out = cli("convert", tmp_path / "ours", "--to", "diffllama", "--out", tmp_path / "theirs")
    assert out.returncode == 0, out.stderr
    _, layout, folded, carried, model = out.stdout.splitlines()
    assert layout == f"{tmp_path / 'ours'}: this package's layout"
    assert "folded into W_O" in folded
    assert carried == "carried over: tokenizer.json, generation_config.json"
    assert model == f"model: {tmp_path / 'theirs'}"
    theirs = DiffLlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_refusal_is_one_message(save, tmp_path):
    folder = save("other", {"a": torch.zeros(1)}, **{"config.json": {"model_type": "mamba"}})
    out = cli("convert", folder, "--out", tmp_path / "out")
    assert out.returncode == 2
    assert out.stderr.startswith(f"error: {folder} is a 'mamba' model; accepted: ")
    assert "Traceback" not in out.stderr
    assert not (tmp_path / "out").exists()
