"""Tokenizers: byte-level BPE trained on a corpus, plain bytes, or any Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from diff_transformer.checks import first_line
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD)
_DIGITS = "0123456789"
_BEFORE = "a"  # text before another
_AT_ONCE = 1 << 20  # characters
# Between two words, and between two lines.
_CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=\S\n)(?=\S)")
LONGEST_WORD = 256  # characters that training looks at together: its time grows with the square of a word's length
MIN_VOCAB_SIZE = 256 + len(_DIGITS) + len(SPECIAL_TOKENS)

Key = TypeVar("Key")

# Words, single digits, punctuation, each with the one space before it; then runs of white space.
PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on ``texts``. Decoding the tokens of any Unicode text gives the same text.

    Every digit is a token, together with the space before it, if any: " 42" is always two tokens.

    Args:
        vocab_size: number of tokens, at most. It includes the special tokens ``<|endoftext|>`` (beginning and end of
            text) and ``<|pad|>``, the 256 bytes, and the ten digits with a space. A small corpus may give fewer.

    Raises:
        UserError: if ``vocab_size`` is below 268.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size {vocab_size} is too small; give at least {MIN_VOCAB_SIZE} "
            f"({len(SPECIAL_TOKENS)} special tokens, 256 bytes, {len(_DIGITS)} digits with a space before them)"
        )
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    shorten = pre_tokenizers.Split(Regex(rf"(?m).{{1,{LONGEST_WORD}}}"), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, shorten, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.model = _with_spaced_digits(backend, vocab_size)
    return _wrap(backend)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte of UTF-8, its id; ``<|endoftext|>`` is 256 and ``<|pad|>`` 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The byte-level alphabet writes a printable byte as itself and the others as chr(256), chr(257), ... in order.
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    stand_ins = iter(sorted(char for char in alphabet if ord(char) > 255))
    vocab = {chr(byte) if chr(byte) in alphabet else next(stand_ins): byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend)


def tokenizer_of(state: str) -> PreTrainedTokenizerFast:
    """A tokenizer of :func:`train_tokenizer`, from the JSON of its ``backend_tokenizer``."""
    from tokenizers import Tokenizer

    return _wrap(Tokenizer.from_str(state))


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer with a name or path.

    Args:
        name_or_path: ``"bytes"``, a folder written by ``save_pretrained``, or a name on the Hugging Face hub.

    Raises:
        UserError: if there is no such tokenizer, or it has no fast (Rust) backend.
    """
    if str(name_or_path) == "bytes":
        return byte_tokenizer()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name_or_path), trust_remote_code=False)
    except Exception as error:  # a damaged file can raise KeyError, TypeError, or a plain Exception
        raise UserError(
            f"no tokenizer at {str(name_or_path)!r}; give 'bytes', a folder written by save_pretrained, or a hub name "
            f"that is cached or can be downloaded ({first_line(error)})"
        ) from error
    require_fast(tokenizer)
    return cast("PreTrainedTokenizerFast", tokenizer)


def ids_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest id: more than ``len(tokenizer)`` where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def ids_in_rows(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest id that rows of text hold.

    The spelling of a special token is text there, so a row has none of them but those that begin or end a text. A model
    need not embed the others, such as a ``[PAD]`` that was added to the tokenizer later.
    """
    in_rows = {tokenizer.unk_token_id, tokenizer.eos_token_id, *leading_ids(tokenizer)}
    never = set(tokenizer.all_special_ids) - in_rows
    return max(token for token in tokenizer.get_vocab().values() if token not in never) + 1


def special_tokens_of(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> dict[str, Any]:
    """The fields of a model's configuration for its special tokens; None for those that it does not embed."""
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return {name: token if token is not None and token < vocab_size else None for name, token in ids.items()}


def encode(tokenizer: PreTrainedTokenizerFast, text: str, *, special: bool = False) -> np.ndarray:
    """Token ids of ``text``, int64 [T], with nothing in front or behind.

    The spelling of a special token inside the text is treated as text; with ``special``, as that token, which the text
    of a chat template needs.
    """
    return encode_all(tokenizer, [text], special=special)[0]


def encode_all(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
    """:func:`encode` for many texts at once, on all cores."""
    encodings = _plain(tokenizer, special=special).encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]


def encode_each(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[tuple[Key, str]]
) -> Iterator[tuple[Key, np.ndarray]]:
    """:func:`encode` for any number of texts of any length, each with a key, in little memory.

    About a million characters are encoded at a time. A longer text is cut between words or lines, where no token of a
    byte-level tokenizer crosses.
    """
    parts: list[np.ndarray] = []
    for batch in _batches((key, piece, last) for key, text in texts for piece, last in _pieces(text)):
        encoded = encode_all(tokenizer, [piece for _, piece, _ in batch])
        for (key, _, last), ids in zip(batch, encoded, strict=True):
            parts.append(ids)
            if last:
                yield key, np.concatenate(parts)
                parts = []


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """A text in pieces of ``_AT_ONCE`` characters or a little more, and whether each is the last."""
    start = 0
    while cut := _CUT.search(text, start + _AT_ONCE):
        yield text[start : cut.start()], False
        start = cut.start()
    yield text[start:], True


def _batches(pieces: Iterable[tuple[Key, str, bool]]) -> Iterator[list[tuple[Key, str, bool]]]:
    """Lists of pieces, of about ``_AT_ONCE`` characters."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= _AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_inside(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[np.ndarray]:
    """:func:`encode_all` for texts that stand inside another text.

    Some tokenizers put a space before what they are given (Llama 2, Mistral 7B v0.1), so a text alone has a token that
    it lacks after other text. A text whose first token also covers what is before it counts as it is alone.
    """
    (before,), alone = encode_all(tokenizer, [_BEFORE]), encode_all(tokenizer, texts)
    after = encode_all(tokenizer, [_BEFORE + text for text in texts])
    return [
        joined[len(before) :] if np.array_equal(joined[: len(before)], before) else ids
        for joined, ids in zip(after, alone, strict=True)
    ]


def leading_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that the tokenizer's post-processor puts in front of every text: ``<s>`` (Llama), ``[gMASK] <sop>``
    (GLM), or none (Qwen, GPT-2 and this package's tokenizers)."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, mask = encoded["input_ids"], encoded["special_tokens_mask"]
    return ids[: mask.index(0)] if 0 in mask else []


def token_spans(
    tokenizer: PreTrainedTokenizerFast, text: str, spans: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The token spans (start, end) of character spans of ``text``: all tokens that share a character with the span.

    Raises:
        UserError: for a span that no token covers.
    """
    encoding = _plain(tokenizer).encode(text, add_special_tokens=False)
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    token_ranges = []
    for start, end in spans:
        inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
        if not inside.size:
            raise UserError(f"no token of the text covers characters {start} to {end}; the text has {len(text)}")
        token_ranges.append((int(inside[0]), int(inside[-1]) + 1))
    return token_ranges


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash, 16 hexadecimal digits, of everything that affects the tokens (not of padding and truncation)."""
    state = json.loads(require_fast(tokenizer).to_str())
    state["padding"] = state["truncation"] = None
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]


def require_fast(tokenizer: object) -> Tokenizer:
    """The Rust backend of a tokenizer, which is needed for the offsets of tokens; UserError if it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{type(tokenizer).__name__} has no fast backend; give a tokenizer saved with tokenizer.json")
    return backend


def _with_spaced_digits(backend: Tokenizer, vocab_size: int) -> BPE:
    """The trained model with the tokens " 0" to " 9", which replace the merges that were learned last."""
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    space = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(" ")[0][0]
    digits = [(space, digit) for digit in _DIGITS]
    learned = [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for first, second in digits + [merge for merge in learned if merge not in digits]:
        if first + second not in vocab and len(vocab) == vocab_size:
            break
        vocab.setdefault(first + second, len(vocab))
        merges.append((first, second))
    return BPE(vocab=vocab, merges=merges)


def _wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _plain(tokenizer: PreTrainedTokenizerFast, *, special: bool = False) -> Tokenizer:
    """The backend, set so that it neither pads nor truncates and treats the spelling of special tokens as text, or as
    ``special``. transformers sets all three again whenever it calls it."""
    backend = require_fast(tokenizer)
    backend.encode_special_tokens = not special
    backend.no_padding()
    backend.no_truncation()
    return backend
