import numpy as np
import pytest

from diff_transformer.data import tokens as tokens_module
from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.mixture import PERIOD, Mixture, WeightedCorpora
from diff_transformer.data.prepare import PrepareConfig, prepare
from diff_transformer.data.tokens import LongDocuments, PreparedCorpus, Shards
from diff_transformer.errors import UserError

END = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents of the training side: document i is i + 1 times the letter of its number."""
    root = tmp_path_factory.mktemp("prepared")
    for i in range(20):
        path = root / "in" / ("train" if i else "val") / f"{i:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(chr(ord("a") + i) * (i + 1) * (60 if i == 0 else 1))
    prepare(PrepareConfig((str(root / "in"),), tokenizer="bytes"), root / "out")
    return root / "out"


@pytest.fixture(scope="module")
def tokens(folder):
    return Shards(folder, "train")


@pytest.fixture(scope="module")
def array(folder):
    """The training side as one array, read without the code that is tested."""
    return np.concatenate([np.fromfile(path, "<u2") for path in sorted((folder / "shards").glob("train-*.tokens"))])


def test_shards_read_like_one_array(tokens, array, monkeypatch):
    monkeypatch.setattr(tokens_module, "_OPEN_AT_ONCE", 2)
    tokens = Shards(tokens.folder, "train")
    assert len(tokens) == len(array) == sum(range(2, 21)) + 19
    assert tokens.dtype == array.dtype
    assert len(tokens._records) >= 5
    for a, b in [(0, 5), (0, len(array)), (37, 120), (90, 90), (len(array) - 1, len(array) + 9), (-7, None)]:
        np.testing.assert_array_equal(tokens[a:b], array[a:b])
    positions = np.random.default_rng(0).integers(len(array), size=(4, 33))
    np.testing.assert_array_equal(tokens[positions], array[positions])


def test_document_starts_are_those_after_an_end_of_text(tokens, array):
    starts = np.concatenate(list(tokens.document_starts()))
    np.testing.assert_array_equal(starts, [0, *(np.flatnonzero(array == END)[:-1] + 1)])
    assert tokens.num_documents == 19


def test_every_window_comes_once_an_epoch_in_an_order_of_its_own(tokens, array):
    corpus = PreparedCorpus(tokens, 8, seed=3)
    assert corpus.num_windows == len(array) // 8
    epochs = []
    for epoch in range(4):
        ids, labels = corpus.rows(epoch * corpus.num_windows, corpus.num_windows)
        np.testing.assert_array_equal(ids, labels)
        starts = corpus._starts(epoch, np.arange(corpus.num_windows)) % len(array)
        covered = (starts[:, None] + np.arange(8)) % len(array)
        assert len(np.unique(covered)) == corpus.num_windows * 8
        np.testing.assert_array_equal(ids, array[covered])
        epochs.append(tuple(starts))
    assert len(set(epochs)) == 4
    assert len({min(epoch) % 8 for epoch in epochs}) > 1


def test_any_process_may_ask_for_any_rows(tokens):
    whole = PreparedCorpus(tokens, 8, seed=3).rows(0, 60)[0]
    for first in (0, 7, 59):
        np.testing.assert_array_equal(PreparedCorpus(tokens, 8, seed=3).rows(first, 1)[0][0], whole[first])
    assert not np.array_equal(PreparedCorpus(tokens, 8, seed=4).rows(0, 60)[0], whole)
    mixture = Mixture({"text": PreparedCorpus(tokens, 8, seed=3)}, {"text": 1.0}, 12)
    for step in range(3):
        batch = mixture.batch(step)
        for world in (1, 2, 3, 4, 6, 12):
            parts = [mixture.batch(step, rank, world) for rank in range(world)]
            for name in ("input_ids", "labels", "source"):
                np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), batch[name])


def test_long_documents_worked_by_hand(tmp_path):
    """Five documents, the end of text included: 3, 10, 4, 6 and 7 tokens at 0, 3, 13, 17 and 23. Long from 7 tokens on:
    the second (10 tokens, 10 / 4 = 2.5: 3 rows of 4) and the fifth (7 tokens, 1.75: 2 rows). The others have 13 tokens
    in all: 3 windows."""
    for name, text in zip("abcde", ("xx", "123456789", "yyy", "zzzzz", "ABCDEF"), strict=True):
        path = tmp_path / "in" / "train" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "in" / "val").mkdir()
    (tmp_path / "in" / "val" / "v.txt").write_text("held out")
    prepare(PrepareConfig((str(tmp_path / "in"),), tokenizer="bytes"), tmp_path / "out")
    tokens = Shards(tmp_path / "out", "train")
    assert len(tokens) == 30
    corpus = LongDocuments(tokens, 4, threshold=7, factor=3, seed=1)
    assert corpus.num_windows == 3 + 3 * (3 + 2)
    others = [*b"xx", END, *b"yyy", END, *b"zzzzz", END]
    for epoch in range(3):
        found = [tuple(row) for row in corpus.rows(epoch * 18, 18)[0].tolist()]
        long = {
            tuple(b"1234"): 3,
            tuple(b"5678"): 3,
            (*b"9", END, *b"yy"): 3,  # goes on with what follows the document
            tuple(b"ABCD"): 3,
            (*b"EF", END, *b"x"): 3,  # and at the end of the corpus with its beginning
        }
        for row, times in long.items():
            assert found.count(row) == times
        rest = [row for row in found if row not in long]
        ring = others * 2
        windows = [tuple(ring[i : i + 4]) for i in range(13)]
        assert len(rest) == 3
        assert any(sorted(rest) == sorted(windows[(o + 4 * k) % 13] for k in range(3)) for o in range(13))
    np.testing.assert_array_equal(
        LongDocuments(tokens, 4, threshold=7, factor=3, seed=1).rows(20, 9)[0], corpus.rows(20, 9)[0]
    )
    orders = {tuple(map(tuple, corpus.rows(epoch * 18, 18)[0])) for epoch in range(3)}
    assert len(orders) == 3


def test_errors_of_up_sampling(tokens):
    with pytest.raises(UserError, match=r"no document of .* has 1000 tokens or more; set data.upsample_length lower"):
        LongDocuments(tokens, 8, threshold=1000, factor=2)
    with pytest.raises(UserError, match="less than one window"):
        PreparedCorpus(tokens, 1000)


class Numbered:
    """Row i holds i, after the number of the source."""

    def __init__(self, which, length=2):
        self.which, self.length = which, length

    def rows(self, first, count):
        ids = np.array([[self.which, i] for i in range(first, first + count)])
        return ids, -ids


def test_corpora_come_in_their_proportions_and_in_their_order():
    corpora = WeightedCorpora({"a": Numbered(0), "b": Numbered(1), "c": Numbered(2)}, {"a": 7.0, "b": 2.0, "c": 1.0})
    rows, labels = corpora.rows(0, 2 * PERIOD)
    np.testing.assert_array_equal(labels, -rows)
    assert np.bincount(rows[:PERIOD, 0]).tolist() == np.bincount(rows[PERIOD:, 0]).tolist() == [7000, 2000, 1000]
    for which in range(3):
        np.testing.assert_array_equal(rows[rows[:, 0] == which, 1], np.arange(2 * [7000, 2000, 1000][which]))
    parts = np.stack([np.bincount(part, minlength=3) for part in rows[:, 0].reshape(-1, 1000)])
    assert abs(parts - [700, 200, 100]).max() < 80  # five standard deviations: mixed within a period
    assert not np.array_equal(rows[:PERIOD, 0], rows[PERIOD:, 0])


def test_a_row_of_a_mixture_of_corpora_is_a_function_of_seed_and_index():
    def made(seed):
        return WeightedCorpora({"a": Numbered(0), "b": Numbered(1)}, {"a": 1, "b": 3}, seed)

    whole = made(1).rows(PERIOD - 5, 10)[0]
    for offset in range(10):
        np.testing.assert_array_equal(made(1).rows(PERIOD - 5 + offset, 1)[0][0], whole[offset])
    assert any(not np.array_equal(made(seed).rows(PERIOD - 5, 10)[0], whole) for seed in (2, 3))


def test_errors_of_weights():
    with pytest.raises(UserError, match="the weight of b is below 1 in 10000"):
        WeightedCorpora({"a": Numbered(0), "b": Numbered(1)}, {"a": 1, "b": 1e-6})


def test_a_prepared_folder_is_a_corpus_of_its_first_documents(folder):
    corpus = load_corpus(folder)
    assert [document.text for document in corpus.train] == [chr(ord("a") + i) * (i + 1) for i in range(1, 20)]
    assert [document.text for document in corpus.validation] == ["a" * 60]
    assert [document.text for document in load_corpus(folder, max_bytes=8).train] == ["bb", "ccc", "ddd"]
