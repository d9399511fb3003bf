"""cl100k, the tokenizer of the paper's 3B models (appendix C), converted from tiktoken to Hugging Face's format."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CL100K = "cl100k"
SUFFIX = ".tiktoken"
END_OF_TEXT = "<|endoftext|>"

# cl100k splits text by this pattern before it merges bytes; tiktoken writes it with possessive quantifiers.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_RANKS = 100_256
_SPECIAL = {
    END_OF_TEXT: 100_257,
    "<|fim_prefix|>": 100_258,
    "<|fim_middle|>": 100_259,
    "<|fim_suffix|>": 100_260,
    "<|endofprompt|>": 100_276,
}


def is_tiktoken(name: str | Path) -> bool:
    """True if ``name`` is "cl100k" or a file of tiktoken ranks."""
    return str(name) == CL100K or Path(name).suffix == SUFFIX


def tiktoken_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """``"cl100k"``, or a file of ranks in tiktoken's format, with cl100k's splitting of text.

    tiktoken downloads cl100k's ranks once, or finds them in ``TIKTOKEN_CACHE_DIR``. The ids are tiktoken's. Unused ids
    get a token ``<|unused_ID|>``, so that the vocabulary has no gaps: cl100k has 100,277 tokens. With other ranks, the
    end of text is the id after the last rank.

    Raises:
        ValueError: if ``tiktoken`` is not installed, the ranks cannot be downloaded, or the file is not one of ranks.
    """
    try:
        from tiktoken.load import load_tiktoken_bpe
    except ImportError:
        raise UserError(f"the tokenizer {str(name)!r} needs `pip install tiktoken`") from None
    if str(name) == CL100K:
        ranks, special = _cl100k()
    else:
        if not Path(name).is_file():
            raise UserError(f"no file of tiktoken ranks at {str(name)!r}")
        try:
            ranks = load_tiktoken_bpe(str(name))
        except Exception as error:
            raise UserError(
                f"{name} is no file of tiktoken ranks ({error}): a line is base64, a space, a rank"
            ) from error
        special = _SPECIAL if len(ranks) == _RANKS else {END_OF_TEXT: max(ranks.values(), default=0) + 1}
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"the ranks of {name} lack {len(missing)} of the 256 bytes, such as {missing[0]:#04x}")
    return _convert(ranks, special)


def _cl100k() -> tuple[dict[bytes, int], dict[str, int]]:
    import tiktoken

    try:
        encoding = cast(Any, tiktoken.get_encoding("cl100k_base"))
    except Exception as error:  # the type depends on the library's version and on where it fails
        raise UserError(
            "tiktoken has no copy of cl100k_base and cannot download it "
            f"({type(error).__name__}: {(str(error) or 'no reason given').splitlines()[0]}); connect this machine "
            "once, or copy TIKTOKEN_CACHE_DIR from one that has it, or give the file: --tokenizer cl100k_base.tiktoken"
        ) from error
    return encoding._mergeable_ranks, encoding._special_tokens


def _convert(ranks: dict[bytes, int], special: dict[str, int]) -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"ranks{SUFFIX}"
        path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()))
        vocab, merges = TikTokenConverter().extract_vocab_merges_from_model(str(path))
    used = set(ranks.values())
    names = {number: token for token, number in special.items()}
    extra = [i for i in range(max(names) + 1) if i not in used]
    tokens = [names.get(i, f"<|unused_{i}|>") for i in extra]
    vocab.update(zip(tokens, extra, strict=True))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
