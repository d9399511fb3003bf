"""The examples run: shortened here, whole under ``-m slow``, with the results that docs/examples.md tells of."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_vit_shortened(example):
    results = example("vit").main(steps=2)
    assert results.keys() == {"softmax", "diff"}
    assert all(0 <= result["accuracy"] <= 1 for result in results.values())
    # 2 layers: four lambda vectors of 8 and a head norm of 16 each.
    assert results["diff"]["parameters"] - results["softmax"]["parameters"] == 2 * (4 * 8 + 16)


def test_vit_sees_all_patches(example):
    """Not causal: the first patch's output depends on the last patch."""
    vit = example("vit")
    block = vit.Block("diff", 0)
    x = torch.randn(1, 16, vit.WIDTH, requires_grad=True)
    block(x)[0, 0].sum().backward()
    assert x.grad[0, -1].abs().max() > 0


def test_vit_draws_what_it_says(example):
    vit = example("vit")
    images, digits = vit.draw(200, torch.Generator().manual_seed(0))
    assert images.shape == (200, 1, 28, 28)
    assert set(digits.tolist()) == set(range(10))
    assert vit.glyphs()[8].tolist() == [[1, 1, 1], [1, 0, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1]]
    again, _ = vit.draw(200, torch.Generator().manual_seed(0))
    assert torch.equal(images, again)


@pytest.mark.slow
def test_vit_whole(example):
    results = example("vit").main()
    assert min(result["accuracy"] for result in results.values()) > 0.9


def test_encoder_decoder_shortened(example):
    results = example("encoder_decoder").main(steps=2, rows=20)
    assert results.keys() == {"softmax", "diff"}
    assert all(0 <= result["whole"] <= 1 for result in results.values())


def test_the_task_is_to_write_backwards(example):
    module = example("encoder_decoder")
    read, write = module.draw(50, torch.Generator().manual_seed(0))
    for letters, answer in zip(read.tolist(), write.tolist(), strict=True):
        kept = [letter for letter in letters if letter != module.PAD]
        filled = [module.START, *kept[::-1], module.END]
        assert answer == filled + [module.PAD] * (14 - len(filled))


@pytest.mark.parametrize("kind", ["softmax", "diff"])
def test_padding_of_what_is_read_changes_nothing_and_the_decoder_does_not_look_ahead(example, kind):
    module = example("encoder_decoder")
    torch.manual_seed(0)
    model = module.EncoderDecoder(kind).eval()
    read, write = module.draw(1, torch.Generator().manual_seed(3))
    length = int((read != module.PAD).sum())
    assert length < module.LONGEST
    logits = model(read, write)
    torch.testing.assert_close(model(read[:, :length], write), logits, atol=1e-5, rtol=1e-5)
    changed = write.clone()
    changed[:, 5:] = 7
    torch.testing.assert_close(model(read, changed)[:, :5], logits[:, :5], atol=1e-5, rtol=1e-5)
    other = read.clone()
    other[0, 0] = 3 + (int(read[0, 0]) - 2) % 20
    assert (model(other, write) - logits).abs().max() > 1e-3  # it does read


@pytest.mark.slow
def test_encoder_decoder_whole(example):
    results = example("encoder_decoder").main()
    assert min(result["whole"] for result in results.values()) > 0.9


def test_ten_lines_turn_the_gpt_differential(example):
    module = example("nanogpt_drop_in")
    assert len(module.new_lines()) == 10
    ours = inspect.getsource(module.DifferentialSelfAttention).splitlines()
    theirs = inspect.getsource(module.CausalSelfAttention).splitlines()
    assert len(ours) - len(theirs) == 8  # ten new, two gone


def test_the_ten_lines_are_this_package_s_layer(example):
    """The same weights give the same output as ``DiffAttention``."""
    from diff_transformer import DiffAttention

    module = example("nanogpt_drop_in")
    torch.manual_seed(0)
    written, layer = module.DifferentialSelfAttention(32, 8, 1), DiffAttention(32, 8, is_causal=True, layer_index=1)
    with torch.no_grad():
        for name, weight in zip(("q_proj", "k_proj", "v_proj"), written.qkv.weight.chunk(3), strict=True):
            getattr(layer, name).weight.copy_(weight)
        layer.o_proj.weight.copy_(written.out.weight)
        layer.core.head_norm.weight.copy_(written.norm.weight)
        (q1, k1), (q2, k2) = written.vectors
        for name, vector in {"lambda_q1": q1, "lambda_k1": k1, "lambda_q2": q2, "lambda_k2": k2}.items():
            getattr(layer.core.lam, name).copy_(vector)
    x = torch.randn(2, 11, 32)
    torch.testing.assert_close(written(x), layer(x)[0], atol=1e-6, rtol=1e-5)


def test_both_gpts_learn(example):
    results = example("nanogpt_drop_in").main(steps=30, batch=8)
    assert all(result["last"] < result["first"] - 1 for result in results.values()), results


@pytest.mark.slow
def test_nanogpt_whole(example):
    results = example("nanogpt_drop_in").main()
    assert all(result["last"] < 2.5 for result in results.values()), results


def test_baseline_gpt_is_causal_softmax_attention(example):
    module = example("nanogpt_drop_in")
    attention = module.CausalSelfAttention(16, 2, 0)
    x = torch.randn(1, 5, 16)
    q, k, v = (y.view(1, 5, 2, 8).transpose(1, 2) for y in attention.qkv(x).chunk(3, -1))
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    expected = F.linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(1, 5, 16), attention.out.weight)
    torch.testing.assert_close(attention(x), expected, atol=1e-6, rtol=1e-5)


def test_the_page_names_every_example():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert set(re.findall(r"examples/(\w+)\.py", page)) == {path.stem for path in EXAMPLES.glob("*.py")}


def test_examples_are_typed():
    """A type checker accepts what they do with the public names."""
    pytest.importorskip("ty", reason="needs pip install ty")
    scripts = sorted(EXAMPLES.glob("*.py"))
    command = [sys.executable, "-m", "ty", "check", "--python", sys.prefix, *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_script_trains_measures_and_reads(example, tmp_path, capfd):
    example("script").main(tmp_path)
    said = capfd.readouterr().out
    assert re.findall(r"^(\w+): validation loss \d\.\d{3} nats a token$", said, re.MULTILINE) == ["diff", "softmax"]
    assert re.search(r"^0\.\d+ of the attention is on the answer$", said, re.MULTILINE)


def test_layer_maps_shortened(example, tmp_path, monkeypatch):
    module = example("layer_maps")
    monkeypatch.setattr(module, "STEPS", 2)
    module.main(tmp_path / "maps.svg")
    picture = (tmp_path / "maps.svg").read_text()
    assert [title in picture for title in ("first map", "lambda times the second", "their difference")] == [True] * 3
    assert picture.count("<rect") > 50


@pytest.mark.slow
def test_layer_maps_whole(example, tmp_path, capsys):
    example("layer_maps").main(tmp_path / "maps.svg")
    loss, weight = re.findall(r"(\d\.\d+)(?: nats| of its weight)", capsys.readouterr().out)
    assert float(loss) < 0.01
    assert float(weight) > 0.4
