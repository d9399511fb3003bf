import numpy as np
import pytest

from diff_transformer.data import tokens as tokens_module
from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.packing import PackedCorpus
from diff_transformer.data.prepare import PrepareConfig, prepare
from diff_transformer.data.tokens import Shards


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


def test_rows_are_those_of_one_array(tokens, array):
    rows, expected = (PackedCorpus(of, 8, seed=3).rows(5, 60)[0] for of in (tokens, array))
    np.testing.assert_array_equal(rows, expected)


def test_a_prepared_folder_is_a_corpus_of_its_first_documents(folder):
    corpus = load_corpus(folder)
    assert [document.text for document in corpus.train] == [chr(ord("a") + i) * (i + 1) for i in range(1, 20)]
    assert [document.text for document in corpus.validation] == ["a" * 60]
    assert [document.text for document in load_corpus(folder, max_bytes=8).train] == ["bb", "ccc", "ddd"]
