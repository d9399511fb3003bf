"""``diff-transformer eval``: one experiment on one model, with the corpus and sizes from the command line."""

from pathlib import Path

from diff_transformer.checks import require_positive
from diff_transformer.evals.lm import CausalLM
from diff_transformer.evals.types import Result

NAMES = ("loss", "needle", "allocation", "outliers")
_CELLS = ((1, 1), (2, 2), (4, 2), (6, 2))


def load_lm(name_or_path: str) -> CausalLM:
    """A causal LM and its tokenizer from a folder or the hub.

    Raises:
        FileNotFoundError: for a path that does not exist.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import diff_transformer.model.modeling  # noqa: F401  (registers the model class)

    if name_or_path.startswith((".", "/", "~")) and not Path(name_or_path).expanduser().exists():
        raise FileNotFoundError(f"no model at {name_or_path}; give a folder written by save_pretrained, or a hub name")
    model = AutoModelForCausalLM.from_pretrained(name_or_path)
    return CausalLM(model, AutoTokenizer.from_pretrained(name_or_path), Path(name_or_path).name)


def run_eval(name: str, model: str, *, corpus: str, length: int, samples: int, out: Path) -> Result:
    """Run the experiment ``name`` on ``model`` over held-out text of ``corpus``; save the result to ``out``.

    Raises:
        ValueError: for an unknown experiment or sizes that are not positive.
        FileExistsError: if ``out`` exists.
    """
    if name not in NAMES:
        raise ValueError(f"no experiment {name!r}; there are: {', '.join(NAMES)}")
    require_positive(length=length, samples=samples)
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another file")
    from diff_transformer.data.corpus import load_corpus
    from diff_transformer.data.filler import Filler

    lm, documents = load_lm(model), load_corpus(corpus)
    if name in ("loss", "outliers"):
        result = _on_rows(name, lm, documents, length, samples)
    elif name == "needle":
        from diff_transformer.evals.needle import evaluate_needle

        result = evaluate_needle(lm, Filler(documents.validation), settings=_CELLS, length=length, samples=samples)
    else:
        from diff_transformer.evals.allocation import evaluate_allocation

        result = evaluate_allocation(lm, Filler(documents.validation), length=length, samples=samples)
    result.save(out)
    return result


def _on_rows(name: str, lm: CausalLM, documents, length: int, samples: int) -> Result:
    from diff_transformer.data.packing import PackedCorpus, pack_documents
    from diff_transformer.evals.associative_recall import evaluate_associative_recall
    from diff_transformer.evals.outliers import evaluate_outliers
    from diff_transformer.train.config import EvaluationConfig
    from diff_transformer.train.materials import spread_rows

    held_out = PackedCorpus.from_documents(documents.validation, lm.tokenizer, length, shuffle=False)
    rows = spread_rows(held_out, min(samples, held_out.num_windows))
    if name == "outliers":
        return evaluate_outliers(lm, rows)
    settings = EvaluationConfig()
    tokens = pack_documents(documents.train, lm.tokenizer)
    return evaluate_associative_recall(
        lm, rows, tokens, vocab_size=len(lm.tokenizer), n=settings.ngram, frequent_share=settings.frequent_share
    )
