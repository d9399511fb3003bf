"""Typed texts: the maps are those of the model, and what cannot be drawn is refused with a reason."""

import base64

import numpy as np
import pytest
import torch

from diff_transformer.data.tokenizer import byte_tokenizer, encode
from diff_transformer.evals.lm import CausalLM
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.loading import load_model
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.report.explorer import packed_examples
from diff_transformer.report.prompt_maps import BYTES, PromptError, TypedPrompts, UnknownModel, check_text, title_of

TEXT = "a b</script>\n7"
POSITIONS = 24
TYPES = ("diff", "softmax", "diff_v2", "grouped_diff", "dint")  # grouped_diff: 3 signal heads share a noise head


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A comparison's models, untrained: two layers each."""
    home = tmp_path_factory.mktemp("comparison")
    tokenizer = byte_tokenizer()
    for attention in TYPES:
        config = DiffTransformerConfig(
            attention=attention, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=POSITIONS, initializer_range=0.5,
        )  # fmt: skip
        torch.manual_seed(1)
        path = home / "members" / f"{attention}-seed0" / "run" / "model"
        DiffTransformerForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    (home / "members" / "diff-seed1" / "run").mkdir(parents=True)  # not finished
    return home


@pytest.fixture(scope="module")
def prompts(folder):
    return TypedPrompts(folder)


def test_members_are_the_finished_models_that_have_two_maps_at_most(prompts):
    assert list(prompts.members) == ["diff-seed0", "softmax-seed0", "diff_v2-seed0", "grouped_diff-seed0"]


@pytest.mark.parametrize("attention", ["diff", "softmax", "diff_v2", "grouped_diff"])
def test_the_maps_are_what_the_model_computes(prompts, folder, attention):
    name = f"{attention}-seed0"
    entry = prompts.entry(name, TEXT)
    lm = CausalLM(*load_model(str(folder / "members" / name / "run" / "model")), name)
    ids = torch.from_numpy(encode(lm.tokenizer, TEXT))[None]
    length = ids.shape[1]
    assert "".join(entry["tokens"]) == TEXT
    assert (entry["attention"], entry["seed"], entry["layers"]) == (attention, 0, 2)
    expected = torch.stack(lm.last_row_attention(ids)).numpy()  # [L, H, T]

    def last_row(part):
        raw = np.frombuffer(base64.b64decode(entry[part]), np.uint8).reshape(2, entry["heads"], length, length)
        return (raw[:, :, -1] / 255.0) ** 2

    drawn = last_row("first")
    assert ("second" in entry) == (attention != "softmax")
    if "second" in entry:
        drawn = drawn - np.array(entry["lambda"])[:, None, None] * last_row("second")
    assert np.abs(drawn - expected).max() < 2 / 255  # a byte's half step is at most 1 / 255 of each map
    (example,) = packed_examples([entry])
    assert example["tokens"] == entry["tokens"]


def test_no_continuation_where_no_position_is_left(prompts):
    assert prompts.entry("diff-seed0", "x" * POSITIONS)["generated"] == ""
    assert prompts.entry("diff-seed0", "x")["generated"] != ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("x" * (POSITIONS + 1), f"has 25 tokens; diff-seed0 takes 1 to {POSITIONS}"),
        ("é" * (BYTES // 2 + 1), "8,194 bytes; 8,192 are taken"),
        ("a\ud800", "half of a character"),
    ],
)
def test_texts_that_cannot_be_drawn_are_refused(prompts, text, said):
    with pytest.raises(PromptError, match=said):
        prompts.entry("diff-seed0", text)


@pytest.mark.parametrize("name", ["../../etc", "diff-seed1", "dint-seed0", ""])
def test_only_models_of_the_comparison_answer(prompts, name):
    with pytest.raises(UnknownModel, match="there are diff-seed0, softmax-seed0"):
        prompts.entry(name, TEXT)


def test_a_folder_without_models_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="members"):
        TypedPrompts(tmp_path)


def test_titles_are_one_short_line():
    assert title_of("a\n b") == "Typed: a b"
    assert len(title_of("x" * 100)) == len("Typed: ") + 40
    check_text("x" * BYTES)
