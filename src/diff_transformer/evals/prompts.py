"""Prompts: choices as continuations in tokens, a document cut so that it fits, chat templates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diff_transformer.data.tokenizer import encode, encode_all, leading_ids, require_fast
from diff_transformer.errors import UserError
from diff_transformer.evals.likelihood import common_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_WINDOW = 2000  # characters at the end of a context that are tokenised again with each choice
_SYNC = 64  # tokens that must agree between the window and the whole context before they are joined
SMALLEST = 16  # tokens of a document that a prompt must keep


def check_template(tokenizer, chat_template: bool) -> None:
    """Raise UserError for a chat template that the tokenizer does not have."""
    if chat_template and not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the model's tokenizer has no chat template; leave --chat-template out, or give an instruct model"
        )


def template_details(chat_template: bool, scoring: str = "") -> dict:
    """``asked`` of a result, which says on the page how questions were put, if not in the experiment's own way."""
    asked = ", ".join(filter(None, ["through the tokenizer's chat template" if chat_template else "", scoring]))
    return {"asked": f"asked {asked}"} if asked else {}


def templated(tokenizer, text: str, beginning: str = "") -> str:
    """The prompt that the tokenizer's chat template makes of the user's message ``text``, up to ``beginning``, the
    first words of the reply. A template that can switch a model's thinking off does so."""
    messages = [{"role": "user", "content": text}]
    return (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        + beginning
    )


def without_special(tokenizer, text: str) -> str:
    """``text`` with a space inside each spelling of a special token, which in a chat template would be that token."""
    for spelling in special_spellings(tokenizer):
        text = text.replace(spelling, f"{spelling[0]} {spelling[1:]}")
    return text


def special_spellings(tokenizer) -> list[str]:
    """The spellings of the tokenizer's special tokens, of two characters or more."""
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and len(str(token)) > 1]


def choice_tokens(
    tokenizer: "PreTrainedTokenizerFast", context: str, choices: Sequence[str]
) -> tuple[list[int], list[list[int]]]:
    """Tokens to score each of ``choices`` as a continuation of ``context``: (context, one sequence per choice).

    Context and choice are tokenised together, as one text. The common prefix of the context and of all these texts is
    the context; the rest of each text is its continuation. If a token crosses the border between context and choice,
    the context ends before it for all choices. All texts are then scored from the same place, and the sum over a
    continuation is exactly the log-probability of that text's tokens.

    Raises:
        ValueError: for no choices, an empty choice, or an empty context where the tokenizer has neither BOS nor EOS.
    """
    if not choices or not all(choices):
        raise UserError(f"the choices are {list(choices)!r}; give at least one, none of them empty")
    before = leading_ids(tokenizer)
    tokenise = _whole if len(context) <= 2 * _WINDOW else _long
    alone, texts = tokenise(tokenizer, context, choices)
    shared = common_prefix([alone, *texts])
    if not before and not shared:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise UserError("an empty context needs a tokenizer with a bos_token or an eos_token")
        before = [start]
    return before + alone[:shared], [text[shared:] for text in texts]


def _whole(tokenizer, context: str, choices: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    alone, *texts = [ids.tolist() for ids in encode_all(tokenizer, [context, *(context + each for each in choices)])]
    return alone, texts


def _long(tokenizer, context: str, choices: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """``_whole`` for a long context, which is tokenised once instead of once per choice where the tokenizer allows it.

    The end of the context is tokenised with each choice and joined to the tokens of the whole context where the two
    agree. The longest choice checks that this is exact; otherwise every text is tokenised as a whole.
    """
    whole, (whole_longest,) = _whole(tokenizer, context, [max(choices, key=len)])
    tail_alone, tails = _whole(tokenizer, context[-_WINDOW:], choices)
    same = common_prefix([whole[::-1], tail_alone[::-1]])  # tokens at the end on which both agree
    cut = len(tail_alone) - same
    stem = whole[: len(whole) - same]
    texts = [stem + ids[cut:] for ids in tails]
    intact = all(ids[: cut + _SYNC] == tail_alone[: cut + _SYNC] for ids in tails)
    if same > 2 * _SYNC and intact and whole_longest in texts:
        return whole, texts
    return _whole(tokenizer, context, choices)


@dataclass(frozen=True)
class Fitted:
    """A prompt that fits, and the part of the document in it."""

    prompt: str
    document: str


def fit_document(
    tokenizer, document: str, frame: Callable[[str], str], limit: int | None, special: bool = False
) -> Fitted:
    """``frame(document)``, with the end of the document cut as needed for at most ``limit`` tokens.

    ``limit`` includes the tokens that the tokenizer puts in front of every text (BOS). ``special`` as of ``encode``.

    Raises:
        ValueError: if fewer than 16 tokens of the document would remain, or the tokenizer has no fast backend.
    """
    require_fast(tokenizer)
    if limit is not None:
        limit -= len(leading_ids(tokenizer))
    prompt = frame(document)
    if limit is None or len(encode(tokenizer, prompt, special=special)) <= limit:
        return Fitted(prompt, document)
    room = limit - len(encode(tokenizer, frame(""), special=special))
    ends = [
        end for _, end in tokenizer(document, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    ]
    total = len(ends)
    while total and room >= min(SMALLEST, total):
        kept = document[: ends[min(room, total) - 1]]
        prompt = frame(kept)
        over = len(encode(tokenizer, prompt, special=special)) - limit
        if over <= 0:
            return Fitted(prompt, kept)
        room -= over
    raise UserError(
        f"a prompt of {max(limit, 0)} tokens leaves {max(room, 0)} for a document of {total}, below the least of "
        f"{min(SMALLEST, total)}; give a model with more positions, fewer new tokens, or another length"
    )
