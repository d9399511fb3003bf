import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from diff_transformer.data.documents import Document
from diff_transformer.data.packing import PackedCorpus, pack_documents
from diff_transformer.data.tokenizer import byte_tokenizer


def _corpus(length=8, tokens=100, **options):
    return PackedCorpus(np.arange(tokens, dtype=np.uint16), length, **options)


def test_documents_are_joined_by_the_end_of_text_token():
    tokenizer = byte_tokenizer()
    tokens = pack_documents([Document("a", "ab"), Document("b", ""), Document("c", "<|endoftext|>")], tokenizer)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [*b"ab", 256, 256, *b"<|endoftext|>", 256]
    corpus = PackedCorpus(pack_documents([Document("a", "abcdefg")], tokenizer), 4, shuffle=False)
    assert corpus.rows(0, 2)[0].tolist() == [[*b"abcd"], [*b"efg", 256]]


def test_ids_beyond_16_bits_and_with_gaps_are_kept_whole():
    words = Tokenizer(WordLevel({"a": 0, "b": 70_000, "<end>": 1}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokens = pack_documents([Document("d", "a b")], tokenizer)
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [0, 70_000, 1]


def test_rows_are_a_pure_function_of_seed_and_index():
    corpus = _corpus(seed=3)
    ids, labels = corpus.rows(5, 40)  # spans four epochs
    assert ids.dtype == labels.dtype == np.int64
    assert ids.shape == labels.shape == (40, 8)
    for offset in range(40):
        single = _corpus(seed=3).rows(5 + offset, 1)
        np.testing.assert_array_equal(single[0][0], ids[offset])
        np.testing.assert_array_equal(single[1][0], labels[offset])
    assert not np.array_equal(_corpus(seed=4).rows(5, 40)[0], ids)


def test_an_epoch_shows_each_token_at_most_once_and_misses_less_than_a_window():
    corpus = _corpus(length=8, tokens=100)
    for epoch in range(5):
        ids = corpus.rows(epoch * corpus.num_windows, corpus.num_windows)[0].ravel()
        assert len(np.unique(ids)) == len(ids) == 96
        np.testing.assert_array_equal(np.diff(ids.reshape(-1, 8), axis=1) % 100, 1)  # stretches of the ring


def test_epochs_differ_in_their_cut_and_their_order():
    corpus = _corpus(length=8, tokens=100)
    starts = [corpus.rows(epoch * 12, 12)[0][:, 0] for epoch in range(6)]
    assert len({tuple(epoch) for epoch in starts}) == 6
    assert len({int(epoch.min() % 8) for epoch in starts}) > 1


def test_without_shuffling_the_corpus_comes_in_order():
    ids = _corpus(length=8, tokens=100, shuffle=False).rows(0, 12)[0]
    np.testing.assert_array_equal(ids.ravel(), np.arange(96))


def test_errors(tokenizer):
    with pytest.raises(ValueError, match="the held-out side has 7 tokens, less than one window of 8; give more text"):
        _corpus(length=8, tokens=7, name="the held-out side")
    with pytest.raises(ValueError, match="length must be at least 2"):
        _corpus(length=1)
    bare = byte_tokenizer()
    bare.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        pack_documents([Document("a", "text")], bare)


def test_rows_are_spread_over_the_corpus():
    packed = PackedCorpus(np.arange(100, dtype=np.uint16), 10, shuffle=False)
    assert packed.spread(5)[:, 0].tolist() == [0, 20, 40, 60, 80]
    assert len(packed.spread(11)) == 10
