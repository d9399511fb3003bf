"""Vocabularies of tiktoken become tokenizers with the same tokens."""

import base64
import json
import random

import pytest
import tiktoken
import tiktoken_ext.openai_public
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from diff_transformer.data.tokenizer import load_tokenizer

_PARTS = [*" \n\t\raZ'.,!?-—9٣", "  ", " \n", "\r\n", *"\x0b\x0c\x1c\x85\xa0\u2003\u2028\u3000"]
_PARTS += ["the", "'s", "'LL", "é", "日本", "ß", "\u0301", "😀", "<|endoftext|>", "\x00", "\ufeff", "12345", " walked"]


def odd_texts(count, seed=0):
    generator = random.Random(seed)
    return ["".join(generator.choices(_PARTS, k=generator.randrange(40))) for _ in range(count)]


@pytest.fixture(scope="module")
def wild():
    """A tokenizer whose merges cross word borders, so that another split of a text gives other tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(odd_texts(4000, seed=1), trainer)
    return json.loads(backend.to_str())


@pytest.fixture(scope="module")
def ranks(wild):
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    vocabulary = sorted((i, token) for token, i in wild["model"]["vocab"].items() if token != "<|endoftext|>")
    return {bytes(byte_of[letter] for letter in token): rank for rank, (_, token) in enumerate(vocabulary)}


@pytest.fixture(scope="module")
def rank_file(ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()))
    return path


def small_cl100k(ranks, monkeypatch):
    """An encoding that splits like tiktoken's cl100k, with the ranks of a small vocabulary."""
    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *a, **k: ranks)
    settings = tiktoken_ext.openai_public.cl100k_base()
    special = {"<|endoftext|>": len(ranks) + 1, "<|fim_prefix|>": len(ranks) + 4}
    return tiktoken.Encoding("small", pat_str=settings["pat_str"], mergeable_ranks=ranks, special_tokens=special)


def test_cl100k_is_tiktokens(ranks, monkeypatch, tmp_path):
    encoding = small_cl100k(ranks, monkeypatch)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"cl100k_base": encoding}[name])
    tokenizer = load_tokenizer("cl100k")
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    for text in odd_texts(3000):
        assert backend.encode(text, add_special_tokens=False).ids == encoding.encode_ordinary(text), repr(text)
    assert tokenizer.eos_token_id == len(ranks) + 1
    assert len(tokenizer) == len(ranks) + 5 == max(tokenizer.get_vocab().values()) + 1  # no holes
    backend.encode_special_tokens = False
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    text = "The river, 1889: café's\n\n  end"
    assert again.decode(again(text)["input_ids"]) == text
    assert again(text)["input_ids"] == encoding.encode_ordinary(text)


def test_a_file_of_ranks(rank_file, ranks, tmp_path):
    assert load_tokenizer(rank_file).eos_token_id == len(ranks)
    (tmp_path / "bad.tiktoken").write_text("no ranks here\n")
    with pytest.raises(ValueError, match=r"bad.tiktoken is no file of tiktoken ranks"):
        load_tokenizer(tmp_path / "bad.tiktoken")
    (tmp_path / "few.tiktoken").write_bytes(base64.b64encode(b"a") + b" 0\n")
    with pytest.raises(ValueError, match="lack 255 of the 256 bytes, such as 0x00"):
        load_tokenizer(tmp_path / "few.tiktoken")
    with pytest.raises(ValueError, match=r"no file of tiktoken ranks at .*none.tiktoken"):
        load_tokenizer(tmp_path / "none.tiktoken")


def test_cl100k_without_a_network_says_what_to_do(monkeypatch):
    def refused(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", refused)
    with pytest.raises(ValueError, match=r"cannot download it \(ConnectionError: no route.*TIKTOKEN_CACHE_DIR.*--tok"):
        load_tokenizer("cl100k")
