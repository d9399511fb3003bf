import dataclasses
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from diff_transformer.data.documents import Document
from diff_transformer.data.filler import Filler
from diff_transformer.data.mixture import WeightedCorpora
from diff_transformer.data.prepare import PrepareConfig, prepare
from diff_transformer.data.tokenizer import byte_tokenizer, load_tokenizer, tokenizer_hash
from diff_transformer.data.tokens import LongDocuments, PreparedCorpus
from diff_transformer.errors import UserError
from diff_transformer.lab.recipes import recipe
from diff_transformer.train.config import override
from diff_transformer.train.loop import train
from diff_transformer.train.text import _tokens
from diff_transformer.train.training_data import load_training_data


def written(root, number, word):
    for i in range(number):
        path = root / ("val" if i % 4 == 0 else "train") / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(f"the {word} walks over hill {i} and river {j}." for j in range(10 + 5 * i)))
    return root


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders of one tokenizer; a third of another."""
    root = tmp_path_factory.mktemp("folders")
    for name, word in (("foxes", "fox"), ("bears", "bear")):
        tokenizer = "bpe" if name == "foxes" else str(root / "foxes" / "tokenizer")
        source = str(written(root / f"{name}-text", 24, word))
        prepare(PrepareConfig((source,), tokenizer=tokenizer, vocab_size=290), root / name)
    prepare(PrepareConfig((str(root / "foxes-text"),), tokenizer="bytes"), root / "bytes")
    return root


@pytest.fixture(scope="module")
def config(folders):
    own = [f"data.corpus={folders / 'foxes'}", "data.max_bytes=null", 'data.mixture={"text": 1.0}']
    return override(recipe("debug"), own)


def test_a_prepared_folder_is_what_training_reads(config, folders):
    training_data = load_training_data(config)
    assert isinstance(training_data.text.source, PreparedCorpus)
    assert training_data.text.source.seed == config.train.seed
    assert tokenizer_hash(training_data.tokenizer) == tokenizer_hash(load_tokenizer(folders / "foxes" / "tokenizer"))
    decoded = training_data.tokenizer.batch_decode(training_data.validation)
    assert all("fox" in text for text in decoded)
    held_out = "".join(document.text for document in training_data.corpus.validation)
    assert all(part in held_out for text in decoded for part in text.split("<|endoftext|>"))
    assert training_data.validation.shape[1] == config.data.length
    assert Filler(training_data.corpus.train).words
    whole = training_data.text.parts[config.data.corpus].tokens[:]
    np.testing.assert_array_equal(training_data.text.tokens(), whole)
    np.testing.assert_array_equal(training_data.text.tokens(100), whole[:100])


def test_training_on_a_prepared_folder_saves_its_tokenizer(config, folders, tmp_path):
    config = override(config, ["train.steps=2", "train.validation_rows=2"])
    train(config, tmp_path / "run")
    saved: Any = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer_hash(saved) == tokenizer_hash(load_tokenizer(folders / "foxes" / "tokenizer"))


def test_folders_of_different_tokenizers_are_refused(config, folders):
    both = {str(folders / name): 1.0 for name in ("foxes", "bytes")}
    with pytest.raises(UserError, match=r"bytes was prepared with another tokenizer than .*foxes; prepare all with"):
        load_training_data(dataclasses.replace(config, data=dataclasses.replace(config.data, corpora=both)))


def test_another_end_of_text_makes_other_tokens(monkeypatch, tmp_path):
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path))
    documents = [Document("a", "one"), Document("b", "two")]
    for tokenizer in (byte_tokenizer(), byte_tokenizer()):
        tokens = _tokens(documents, tokenizer)
        assert tokens[3] == tokenizer.eos_token_id
    tokenizer.eos_token = tokenizer.pad_token
    assert _tokens(documents, tokenizer)[3] == tokenizer.eos_token_id != tokens[3]


def test_settings_that_do_not_fit_a_prepared_folder_are_refused(config, folders):
    for change, message in [
        ("model.vocab_size=288", "ids up to 289, model.vocab_size is 288; set model.vocab_size to at least 290"),
        ("data.upsample_length=100000", "has 100000 tokens or more; set data.upsample_length lower"),
        ("data.length=90000", "the validation side of .*foxes has .* less than one row of 90000"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_training_data(override(config, [change]))
    with pytest.raises(ValueError, match=r"needs a prepared folder, .* `diff-transformer prepare .* --out FOLDER`"):
        load_training_data(override(config, [f"data.corpus={folders / 'foxes-text'}", "data.upsample_length=9"]))


def test_corpora_are_mixed_by_weight_beside_needles_and_recall(config, folders):
    weights = {str(folders / "foxes"): 3.0, str(folders / "bears"): 1.0}
    shares = 'data.mixture={"text": 0.8, "needles": 0.1, "recall": 0.1}'
    config = override(config, ["train.batch_size=40", "data.length=200", shares])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, corpora=weights))
    training_data = load_training_data(config)
    assert isinstance(training_data.text.source, WeightedCorpora)
    assert training_data.mixture.rows_per_source == {"text": 32, "needles": 4, "recall": 4}
    foxes = bears = 0
    for step in range(25):
        batch = training_data.mixture.batch(step)
        for text in training_data.tokenizer.batch_decode(batch["input_ids"][batch["source"] == 0]):
            foxes, bears = foxes + ("fox" in text), bears + ("bear" in text)
    assert foxes + bears == 25 * 32
    assert 0.70 < foxes / (foxes + bears) < 0.80  # three standard deviations of 800 draws
    held_out = training_data.tokenizer.batch_decode(training_data.validation)
    assert sum("fox" in text for text in held_out) == 3 * sum("bear" in text for text in held_out) > 0
    assert {type(document) for document in training_data.corpus.train} == {Document}


def test_up_sampling_by_length_reaches_training(config):
    text = load_training_data(override(config, ["data.upsample_length=500", "data.upsample_factor=5"])).text
    assert isinstance(text.source, LongDocuments)
    assert (text.source.threshold, text.source.factor) == (500, 5)
