"""A small made-up prose corpus and a tokenizer trained on it, shared by the data tests."""

import numpy as np
import pytest

from diff_transformer.data.documents import Document
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
