"""Rows of a run, and batches prepared ahead."""

import threading
import time

import numpy as np
import pytest

from diff_transformer.data.documents import Document
from diff_transformer.data.filler import Filler
from diff_transformer.data.prepare import PrepareConfig, prepare
from diff_transformer.data.tokenizer import byte_tokenizer, load_tokenizer, tokenizer_hash
from diff_transformer.data.tokens import Shards
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.stages import load_stages
from diff_transformer.train.config import override
from diff_transformer.train.loop import train
from diff_transformer.train.training_data import _tokens, load_training_data, prefetched


@pytest.fixture(scope="module")
def foxes(tmp_path_factory):
    """A prepared folder."""
    root = tmp_path_factory.mktemp("folders")
    for i in range(24):
        path = root / "text" / ("val" if i % 4 == 0 else "train") / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(f"the fox walks over hill {i} and river {j}." for j in range(10 + 5 * i)))
    return prepare(PrepareConfig((str(root / "text"),), vocab_size=290), root / "foxes")


@pytest.fixture(scope="module")
def config(foxes):
    own = [f"data.corpus={foxes}", "data.max_bytes=null", 'data.mixture={"text": 1.0}']
    return override(recipe("debug"), own)


def test_a_prepared_folder_is_what_training_reads(config, foxes, tmp_path):
    training_data = load_training_data(config)
    assert isinstance(training_data.text.tokens, Shards)
    assert training_data.text.seed == config.train.seed
    hash_of_folder = tokenizer_hash(load_tokenizer(foxes / "tokenizer"))
    assert tokenizer_hash(training_data.tokenizer) == hash_of_folder
    decoded = training_data.tokenizer.batch_decode(training_data.validation)
    assert all("fox" in text for text in decoded)
    held_out = "".join(document.text for document in training_data.corpus.validation)
    assert all(part in held_out for text in decoded for part in text.split("<|endoftext|>"))
    assert training_data.validation.shape[1] == config.data.length
    assert Filler(training_data.corpus.train).words
    np.testing.assert_array_equal(training_data.counted_tokens(), training_data.text.tokens[:])
    trained = train(override(config, ["train.steps=2", "train.validation_rows=2"]), tmp_path / "run")
    assert tokenizer_hash(load_tokenizer(trained.folder / "model")) == hash_of_folder


def test_another_end_of_text_makes_other_tokens(monkeypatch, tmp_path):
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path))
    documents = [Document("a", "one"), Document("b", "two")]
    for tokenizer in (byte_tokenizer(), byte_tokenizer()):
        tokens = _tokens(documents, tokenizer)
        assert tokens[3] == tokenizer.eos_token_id
    tokenizer.eos_token = tokenizer.pad_token
    assert _tokens(documents, tokenizer)[3] == tokenizer.eos_token_id != tokens[3]


def test_batches_come_in_order_and_no_more_are_made_meanwhile():
    made, second = [], threading.Event()

    def prepare(step):
        made.append((step, threading.current_thread() is threading.main_thread()))
        if step == 5:
            second.set()
        return step

    with prefetched(prepare, 3, 100) as batches:
        assert next(batches) == 3
        assert second.wait(10)  # without being asked for
        time.sleep(0.05)
        assert len(made) <= 4  # one taken, two ready, one that waits for room
        assert [next(batches) for _ in range(3)] == [4, 5, 6]
    assert not any(main for _, main in made)
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())


def test_an_error_is_raised_where_its_batch_is_asked_for():
    def prepare(step):
        if step == 2:
            raise OSError("shard 7 is gone")
        return step

    with prefetched(prepare, 0, 5) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(OSError, match="shard 7 is gone"):
            next(batches)


def test_a_plan_takes_the_vocabulary_of_its_prepared_corpus(foxes, monkeypatch):
    monkeypatch.setenv("HOME", str(foxes.parent))
    (stage,) = load_stages("ablation", "~/foxes")
    vocabulary = len(load_tokenizer(foxes / "tokenizer"))
    assert {(of.data.corpus, of.model["vocab_size"]) for of in stage.settings.values()} == {(str(foxes), vocabulary)}
