"""Contextual hallucination (Table 4): does the given text support what the model writes?

    Article: ...  Summary:|  generated greedily          judge: does the article support all of it?     yes / no
    ...  Question: ...  Answer:|  generated greedily     judge: is it a right answer from the text?     yes / no

Accuracy is the share of outputs without hallucination: the judge says yes. Outputs without a verdict are excluded and
counted separately. An empty output counts as wrong without asking the judge. A text that is too long for the model is
cut at its end; the row says so, and the judge sees the same part as the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from diff_transformer.checks import require_positive
from diff_transformer.data.tasks.grounded import UNANSWERABLE, load_grounded
from diff_transformer.data.tasks.types import GroundedItem
from diff_transformer.errors import UserError
from diff_transformer.evals.judges import NO, YES, Judge, Judgement, make_judge
from diff_transformer.evals.lm import LanguageModel, max_positions
from diff_transformer.evals.prompts import (
    asked_details,
    check_asking,
    fit_document,
    templated,
    without_special,
    worded,
)
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result

QUICK = {"samples": 12, "summary_tokens": 40, "answer_tokens": 12}


@dataclass(frozen=True)
class Settings:
    """Texts, questions and the judge."""

    # "python" (made from the running Python's documentation), "hub:all" (the six sets of Table 4: xsum, cnn_dailymail,
    # multi_news, qasper, hotpotqa, 2wikimultihopqa), "hub:NAME", a file, a folder; or several, separated by commas
    data: str = "python"
    # Items of each set, drawn by the seed (the paper has 100).
    samples: int = 100
    # Tokens of prompt and output together; None for as many as the model supports.
    length: int | None = None
    # New tokens for a summary.
    summary_tokens: int = 128
    # New tokens for an answer.
    answer_tokens: int = 32
    # "containment" (no model), "lm:PATH" (a local causal LM), or "endpoint:MODEL", a model of the OpenAI-compatible
    # chat endpoint in the environment variables OPENAI_BASE_URL and OPENAI_API_KEY (extra "judge")
    judge: str = "containment"
    # Fields of the endpoint's requests, as JSON; by default {"temperature": 0, "max_tokens": 16}.
    judge_options: dict | None = None
    # Ask through the tokenizer's chat template.
    chat_template: bool = False
    # Words of a question about a text, with {document} and {question}; empty for the default.
    wording: str = ""
    # Words that ask for a summary, with {document}; empty for the default.
    summary_wording: str = ""
    # Seed of the draw of items.
    seed: int = 0


def run(lm, settings: Settings, samples: Samples) -> Result:
    """Load the sets, make the judge, and evaluate."""
    judge = make_judge(settings.judge, options=settings.judge_options, device=str(lm.device))
    sets = load_grounded(settings.data, samples=settings.samples, seed=settings.seed)
    return evaluate_hallucination(lm, sets, judge, settings, samples)


def evaluate_hallucination(
    lm: LanguageModel,
    sets: Mapping[str, Sequence[GroundedItem]],
    judge: Judge,
    settings: Settings = Settings(),
    samples: Samples | None = None,
) -> Result:
    """A row for each item of ``sets``: its set, the output and the verdict of ``judge``, whose ``score`` is 1 for yes,
    0 for no, and None where it is undecided.

    Raises:
        ValueError: for a length that the model does not support, or that leaves no room for a text.
    """
    length, summary_tokens, answer_tokens = settings.length, settings.summary_tokens, settings.answer_tokens
    chat_template, words = settings.chat_template, {"question": settings.wording, "summary": settings.summary_wording}
    require_positive(length=length, summary_tokens=summary_tokens, answer_tokens=answer_tokens)
    check_asking(lm.tokenizer, chat_template, words["question"], ("document", "question"))
    check_asking(lm.tokenizer, chat_template, words["summary"], ("document",))
    positions = max_positions(lm) if hasattr(lm, "model") else None
    if length is not None and positions is not None and length > positions:
        raise UserError(
            f"length {length} is more than the {positions} positions of {lm.name}; give at most {positions}"
        )
    limit = length or positions
    samples = samples or Samples()
    new_tokens = {"summary": summary_tokens, "question": answer_tokens}
    limited = {name: list(items)[: samples.limit] for name, items in sets.items()}
    judge.prepare([item for items in limited.values() for item in items])

    def write(items: list[GroundedItem]) -> list[dict]:
        return _outputs(lm, items, limit, new_tokens, words, chat_template)

    def decide(batch: list[tuple[GroundedItem, dict]]) -> list[dict]:
        return [_decided(judge, item, output) for item, output in batch]

    rows: list[dict] = []
    for name, items in limited.items():
        written = samples.rows(f"{name}: writing", items, write, batch_size=getattr(lm, "batch_size", 8))

        verdicts = samples.rows(f"{name}: judging by {judge.name}", list(zip(items, written, strict=True)), decide)
        for item, output, verdict in zip(items, written, verdicts, strict=True):
            rows.append({"example": f"{name} {item.id}", "set": name, "kind": item.kind, **output, **verdict})
    asked = asked_details(chat_template, " and ".join(filter(None, words.values())))
    return Result("hallucination", rows, {"judge": judge.name, "length": limit, **asked, "wording": settings.wording})


def frame(item: GroundedItem, document: str, words: str = "") -> str:
    """The prompt that puts ``document`` before a base model; ``words`` are a user's, with {document} and {question}."""
    if words and (item.document or item.kind == "summary"):
        return worded(words, document=document, question=item.question)
    if item.kind == "summary":
        return f"Article:\n{document}\n\nA summary of the article in a few sentences:"
    if not item.document:
        return f"Question: {item.question}\nAnswer:"
    return (
        f"{document}\n\nEach question is answered in a few words from the text above, or with "
        f'"{UNANSWERABLE}" if the text does not say.\n\nQuestion: {item.question}\nAnswer:'
    )


def trimmed(kind: str, text: str) -> str:
    """The output, without what a base model writes after it: an answer is one line, a summary one paragraph."""
    text = text.strip()
    for stop in ("\n",) if kind == "question" else ("\n\n", "\nArticle:"):
        text = text.split(stop, 1)[0]
    return text.strip()


def _outputs(
    lm: LanguageModel,
    items: list[GroundedItem],
    limit: int | None,
    new_tokens: dict[str, int],
    words: dict[str, str],
    chat: bool,
) -> list[dict]:
    def prompt(item: GroundedItem, document: str) -> str:
        text = frame(item, document, words[item.kind])
        return templated(lm.tokenizer, without_special(lm.tokenizer, text)) if chat else text

    rows: list[dict] = [{} for _ in items]
    more = {"templated": True} if chat else {}
    for kind, count in new_tokens.items():
        places = [i for i, item in enumerate(items) if item.kind == kind]
        fitted = [
            fit_document(
                lm.tokenizer, items[i].document, lambda text, item=items[i]: prompt(item, text),
                None if limit is None else limit - count,
            )
            for i in places
        ]  # fmt: skip
        texts = lm.generate([fit.prompt for fit in fitted], count, **more) if places else []
        for i, fit, text in zip(places, fitted, texts, strict=True):
            rows[i] = {
                "prompt": fit.prompt, "expected": " | ".join(items[i].references), "got": trimmed(kind, text),
                "truncated": fit.truncated, "document_tokens": fit.tokens, "document_tokens_kept": fit.kept,
                "document_characters": len(fit.document),
            }  # fmt: skip
    return rows


def _decided(judge: Judge, item: GroundedItem, output: dict) -> dict:
    if not output["got"]:
        return {"score": 0.0, "verdict": NO, "why": "empty output"}
    seen = replace(item, document=item.document[: output["document_characters"]])
    verdict: Judgement = judge(seen, output["got"])
    return {"score": {YES: 1.0, NO: 0.0}.get(verdict.answer), "verdict": verdict.answer, "why": verdict.why}
