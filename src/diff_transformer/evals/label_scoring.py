"""Constrained decoding over a set of texts: tokens that are right for any tokenizer, and the best of the scores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from diff_transformer.data.tokenizer import encode_all
from diff_transformer.evals.likelihood import common_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_WINDOW = 2000  # characters before a choice that are tokenised again with each
_SYNC = 64  # tokens at the end of a long context that must come out the same with and without what is before them


def leading_ids(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """What the tokenizer puts in front of every text: its ``bos_token_id``, or nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []


def choice_tokens(
    tokenizer: "PreTrainedTokenizerFast", context: str, choices: Sequence[str]
) -> tuple[list[int], list[list[int]]]:
    """Tokens to score each of ``choices`` as a continuation of ``context``: (context, one sequence a choice).

    Each choice is tokenised together with the context, as one text. What the context alone and all of these texts begin
    with is the context; the rest of each is its continuation. Where a token crosses the border between context and
    choice, the context ends before it, for all choices alike: every text is scored from the same place, so that the
    scores stay comparable, and the sum over a continuation is exactly the log-probability of the text's own tokens.

    Raises:
        ValueError: for no choices, one without tokens, or an empty context where the tokenizer has no token to begin
            a text with.
    """
    if not choices or not all(choices):
        raise ValueError(f"the choices are {list(choices)!r}; give at least one, none of them empty")
    before = leading_ids(tokenizer)
    alone, texts = (
        _whole(tokenizer, context, choices) if len(context) <= 2 * _WINDOW else _long(tokenizer, context, choices)
    )
    shared = common_prefix([alone, *texts])
    if not before and not shared:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise ValueError("an empty context needs a tokenizer with a bos_token or an eos_token")
        before = [start]
    return before + alone[:shared], [text[shared:] for text in texts]


def best_of(scores: Sequence[float]) -> list[int]:
    """The places of the highest score: one, or all that tie for it exactly."""
    highest = max(scores)
    return [place for place, score in enumerate(scores) if score == highest]


def _whole(tokenizer, context: str, choices: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    alone, *texts = [ids.tolist() for ids in encode_all(tokenizer, [context, *(context + c for c in choices)])]
    return alone, texts


def _long(tokenizer, context: str, choices: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """The same without tokenising a long context once for each choice, where the tokenizer allows it.

    The end of the context is tokenised with each choice, and joined to the tokens of the whole context where both
    agree. That the result is exact is checked on the longest choice; if not, every text is tokenised as a whole.
    """
    tail = context[-_WINDOW:]
    longest = max(range(len(choices)), key=lambda i: len(choices[i]))
    whole, whole_longest = (ids.tolist() for ids in encode_all(tokenizer, [context, context + choices[longest]]))
    tail_alone, tails = _whole(tokenizer, tail, choices)
    same = common_prefix([whole[::-1], tail_alone[::-1]])  # tokens at the end on which both agree
    cut = len(tail_alone) - same
    stem = whole[: len(whole) - same]
    texts = [stem + ids[cut:] for ids in tails]
    intact = all(ids[: cut + _SYNC] == tail_alone[: cut + _SYNC] for ids in tails)
    if same > 2 * _SYNC and intact and texts[longest] == whole_longest:
        return whole, texts
    return _whole(tokenizer, context, choices)
