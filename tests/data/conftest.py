"""A small made-up prose corpus and a tokenizer trained on it, shared by the data tests."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from diff_transformer.data.documents import Document
from diff_transformer.data.filler import Filler
from diff_transformer.data.needles import needle_texts
from diff_transformer.data.tokenizer import train_tokenizer

_VOCABULARY = """
    river mountain letter window garden morning winter silence market village evening captain music table journey
    harbour the a of and to in was that it his her with from over under before after slowly never always perhaps
    walked spoke wrote carried remembered opened waited café naïve 1889 twenty-three can't
"""
_WORDS = _VOCABULARY.split()


def make_prose(seed: int, words: int) -> str:
    rng = np.random.default_rng(seed)
    lines, line = [], []
    for index, word in enumerate(rng.choice(_WORDS, words)):
        line.append(word + (rng.choice([".", ",", "?", '"']) if index % 9 == 8 else ""))
        if len(line) == 12:
            lines.append(" ".join(line))
            line = []
    return "\n".join([*lines, " ".join(line)]) + "\n"


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    return [Document(f"story{index}.txt", make_prose(index, 3000)) for index in range(4)]


@pytest.fixture(scope="session")
def tokenizer(documents):
    return train_tokenizer([*(document.text for document in documents), *needle_texts(300)], 600)


@pytest.fixture(scope="session")
def joining(documents):
    """A tokenizer whose tokens cross spaces, so that counting words one by one is wrong."""
    backend, words = Tokenizer(models.BPE()), Filler(documents).words
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator(["".join(words[i : i + 10]) for i in range(0, 3000, 10)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
