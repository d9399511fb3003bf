"""Contextual hallucination (Table 4): does the given text support what the model writes?

    Article: ...  Summary:|  generated greedily          judge: does the article support all of it?     yes / no
    ...  Question: ...  Answer:|  generated greedily     judge: is it a right answer from the text?     yes / no

Accuracy is the share of outputs without hallucination: the judge says yes. Outputs without a verdict are excluded and
counted separately. An empty output counts as wrong without asking the judge. A text that is too long for the model is
cut at its end; the row says so, and the judge sees the same part as the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diff_transformer.data.tasks.grounded import UNANSWERABLE, load_grounded
from diff_transformer.data.tasks.types import GroundedItem
from diff_transformer.evals.judges import NO, YES, Judge, make_judge
from diff_transformer.evals.lm import CausalLM, check_length, max_positions
from diff_transformer.evals.prompts import check_template, fit_document, template_details, templated, without_special
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result
from diff_transformer.settings import PositiveInt, Seed

QUICK = {"samples": 12, "summary_tokens": 40, "answer_tokens": 12}


@dataclass(frozen=True)
class Settings:
    """Texts, questions and the judge."""

    # "python" (made from the running Python's documentation), "hub:OWNER/SET", such as hub:EdinburghNLP/xsum, a file;
    # or several, separated by commas
    data: str = "python"
    # Items of each set, drawn by the seed (the paper has 100).
    samples: PositiveInt = 100
    # Tokens of prompt and output together; None for as many as the model supports.
    length: PositiveInt | None = None
    # New tokens for a summary.
    summary_tokens: PositiveInt = 128
    # New tokens for an answer.
    answer_tokens: PositiveInt = 32
    # "containment" (no model), or "endpoint:MODEL", a model of the OpenAI-compatible chat endpoint in the environment
    # variables OPENAI_BASE_URL and OPENAI_API_KEY (extra "judge")
    judge: str = "containment"
    # Fields of the endpoint's requests, as JSON; by default {"temperature": 0, "max_tokens": 16}.
    judge_options: dict | None = None
    # Ask through the tokenizer's chat template.
    chat_template: bool = False
    # Seed of the draw of items.
    seed: Seed = 0


def amount(settings: Settings, config: Any) -> tuple[int, None]:
    """Items, at most; "python" is two sets."""
    sets = settings.data.split(",")
    return (len(sets) + sets.count("python")) * settings.samples, None


def run(lm, settings: Settings, samples: Samples) -> Result:
    """Load the sets, make the judge, and evaluate."""
    judge = make_judge(settings.judge, settings.judge_options)
    sets = load_grounded(settings.data, samples=settings.samples, seed=settings.seed)
    return evaluate_hallucination(lm, sets, judge, settings, samples)


def evaluate_hallucination(
    lm: CausalLM,
    sets: Mapping[str, Sequence[GroundedItem]],
    judge: Judge,
    settings: Settings = Settings(),
    samples: Samples = ALL,
) -> Result:
    """A row for each item of ``sets``: its set, the output and the verdict of ``judge``, whose ``score`` is 1 for yes,
    0 for no, and None where it is undecided.

    Raises:
        UserError: for a length that the model does not support, or that leaves no room for a text.
    """
    check_template(lm.tokenizer, settings.chat_template)
    if settings.length is not None:
        check_length(lm, settings.length, "length")
    limit = settings.length or max_positions(lm)
    rows: list[dict] = []
    for name, items in sets.items():

        def score(batch: Sequence[GroundedItem], name: str = name) -> list[dict]:
            rows = []
            for item, output in zip(batch, _outputs(lm, batch, limit, settings), strict=True):
                rows.append({"set": name, "kind": item.kind} | output | _judged(judge, item, output))
            return rows

        scored = samples.rows(name, items, score, batch_size=getattr(lm, "batch_size", 8))
        rows += [{"example": f"{name} {place}", **row} for place, row in enumerate(scored)]
    return Result("hallucination", rows, {"length": limit, **template_details(settings.chat_template)})


def frame(item: GroundedItem, document: str) -> str:
    """The prompt that puts ``document`` before a base model."""
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


def _outputs(lm: CausalLM, items: Sequence[GroundedItem], limit: int | None, settings: Settings) -> list[dict]:
    """Prompt, output and facts about the text's length, for each of ``items``."""
    chat = settings.chat_template

    def prompt(item: GroundedItem, document: str) -> str:
        text = frame(item, document)
        return templated(lm.tokenizer, without_special(lm.tokenizer, text)) if chat else text

    rows: dict[int, dict] = {}
    for kind, count in (("summary", settings.summary_tokens), ("question", settings.answer_tokens)):
        places = [place for place, item in enumerate(items) if item.kind == kind]
        room = None if limit is None else limit - count
        fitted = [
            fit_document(lm.tokenizer, item.document, lambda text, item=item: prompt(item, text), room, chat)
            for item in (items[place] for place in places)
        ]
        texts = lm.generate([fit.prompt for fit in fitted], count, **{"templated": True} if chat else {})
        for place, fit, text in zip(places, fitted, texts, strict=True):
            rows[place] = {
                "prompt": fit.prompt, "expected": " | ".join(items[place].references), "got": trimmed(kind, text),
                "document_characters": len(fit.document), "truncated": fit.document != items[place].document,
            }  # fmt: skip
    return [rows[place] for place in range(len(items))]


def _judged(judge: Judge, item: GroundedItem, output: dict) -> dict:
    if not output["got"]:
        return {"score": 0.0, "verdict": NO, "why": "empty output"}
    seen = replace(item, document=item.document[: output["document_characters"]])
    verdict = judge(seen, output["got"])
    return {"score": {YES: 1.0, NO: 0.0}.get(verdict.answer), "verdict": verdict.answer, "why": verdict.why}
