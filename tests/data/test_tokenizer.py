import time
from typing import Any, cast

import numpy as np
import pytest
from tiny_models import GLM, bos_tokenizer
from transformers import AutoTokenizer

from diff_transformer.data import tokenizer as tokenizer_module
from diff_transformer.data.tokenizer import (
    MIN_VOCAB_SIZE,
    byte_tokenizer,
    encode,
    encode_all,
    encode_each,
    leading_ids,
    load_tokenizer,
    token_spans,
    tokenizer_hash,
    train_tokenizer,
)

TEXTS = [
    "",
    " ",
    "Hello, world! It's 1984 and naïve café-goers can't pay 3.14 €.",
    "def f(x):\n\treturn x  # two  spaces\n\n\n    indented\r\n",
    "日本語のテキスト 한국어 العربية ½ ² ٣",
    "\U0001f600\U0001f469‍\U0001f680 zero​width \x00\x07 \xa0non-breaking",
    "literal <|endoftext|> and <|pad|> in a text",
    "   leading and trailing   ",
]


@pytest.fixture(scope="module", params=["trained", "bytes"])
def any_tokenizer(request, tokenizer):
    return tokenizer if request.param == "trained" else byte_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives(any_tokenizer, text):
    ids = encode(any_tokenizer, text)
    assert ids.dtype == np.int64
    assert any_tokenizer.decode(ids.tolist()) == text
    assert not set(ids.tolist()) & set(any_tokenizer.all_special_ids)


def test_encoding_many_is_encoding_each(any_tokenizer):
    for ids, text in zip(encode_all(any_tokenizer, TEXTS), TEXTS, strict=True):
        np.testing.assert_array_equal(ids, encode(any_tokenizer, text))
    assert any_tokenizer("<|endoftext|>")["input_ids"] == [any_tokenizer.eos_token_id]


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_texts_in_pieces_have_the_tokens_of_the_whole(any_tokenizer, documents, monkeypatch, size):
    monkeypatch.setattr(tokenizer_module, "_AT_ONCE", size)
    texts = {"prose": documents[0].text[:3000], **{text: text for text in TEXTS}}
    found = dict(encode_each(any_tokenizer, texts.items()))
    assert [*found] == [*texts]
    for key, text in texts.items():
        np.testing.assert_array_equal(found[key], encode(any_tokenizer, text))
    assert max(len(piece) for piece, _ in tokenizer_module._pieces(texts["prose"])) < size + 100


def test_a_trained_tokenizer_splits_numbers_into_digits(tokenizer):
    assert len(encode(tokenizer, " 42")) == 2
    assert len(encode(tokenizer, "42")) == 2
    assert len(encode(tokenizer, " 123456")) == 6
    without_digits = train_tokenizer(["no number here " * 50], MIN_VOCAB_SIZE)
    assert [len(encode(without_digits, f" {n}")) for n in (7, 42, 900)] == [1, 2, 3]


def test_training_learns_frequent_words_and_is_repeatable(documents, tokenizer):
    assert len(encode(tokenizer, " mountain")) == 1
    texts = [document.text for document in documents]
    assert tokenizer_hash(train_tokenizer(texts, 400)) == tokenizer_hash(train_tokenizer(iter(texts), 400))


@pytest.mark.parametrize("text", ["a" * 100_000, "\0" * 100_000, "-" * 100_000, "\n" * 100_000, "word " * 20_000])
def test_training_does_not_wait_for_text_without_white_space(text):
    began = time.process_time()
    tokenizer = train_tokenizer([text], 300)
    assert time.process_time() - began < 4  # looking at the whole word takes 12
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_saving_and_loading_changes_nothing(any_tokenizer, tmp_path):
    any_tokenizer.save_pretrained(tmp_path)
    loaded_twice: list[Any] = [AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)]
    for loaded in loaded_twice:
        assert tokenizer_hash(loaded) == tokenizer_hash(any_tokenizer)
        assert loaded.padding_side == "left"
        assert loaded.pad_token_id == any_tokenizer.pad_token_id
        for text in TEXTS:
            np.testing.assert_array_equal(encode(loaded, text), encode(any_tokenizer, text))
            assert loaded.decode(encode(loaded, text).tolist()) == text


def test_load_by_name(tmp_path):
    assert tokenizer_hash(load_tokenizer("bytes")) == tokenizer_hash(byte_tokenizer())
    with pytest.raises(ValueError, match=r"no tokenizer at .*give 'bytes', a folder written by save_pretrained"):
        load_tokenizer(tmp_path)


def test_errors():
    with pytest.raises(ValueError, match=r"vocab_size 257 is too small; give at least 268"):
        train_tokenizer(["text"], 257)
    with pytest.raises(ValueError, match="object has no fast backend"):
        encode(cast(Any, object()), "text")


def test_token_spans_cover_the_characters(any_tokenizer):
    text = "The café by the river was naïve, and 1984 passed slowly."
    for part in ("café", "river was", "1984", text):
        start = text.index(part)
        ((first, last),) = token_spans(any_tokenizer, text, [(start, start + len(part))])
        ids = encode(any_tokenizer, text).tolist()
        assert part in any_tokenizer.decode(ids[first:last])
        assert part not in any_tokenizer.decode(ids[first + 1 : last])
        assert part not in any_tokenizer.decode(ids[first : last - 1])
    with pytest.raises(ValueError, match="no token"):
        token_spans(any_tokenizer, text, [(500, 510)])


def test_padding_left_on_by_a_call_changes_nothing():
    tokenizer = byte_tokenizer()
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=8)
    assert tokenizer.backend_tokenizer.padding is not None
    assert tokenizer.backend_tokenizer.truncation is not None
    assert [ids.tolist() for ids in encode_all(tokenizer, ["a", "bcd", "twelve chars"])] == [
        [97],
        [98, 99, 100],
        list(b"twelve chars"),
    ]
    assert token_spans(tokenizer, "twelve chars", [(7, 12)]) == [(7, 12)]
    assert tokenizer(["a", "bcd"], padding=True)["input_ids"] == [[257, 257, 97], [98, 99, 100]]


@pytest.mark.parametrize(
    ("template", "expected"),
    [("$A", []), ("<|endoftext|> $A", [256]), ("<|pad|> $A", [257]), (GLM, [257, 256]), ("$A <|endoftext|>", [])],
)
def test_what_a_tokenizer_puts_in_front_is_found_whatever_it_is(template, expected):
    chosen = bos_tokenizer(template)
    assert leading_ids(chosen) == expected
    chosen.backend_tokenizer.enable_padding(direction="left", pad_id=257, pad_token="<|pad|>", length=9)
    assert leading_ids(chosen) == expected
