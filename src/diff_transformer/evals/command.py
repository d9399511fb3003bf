"""``diff-transformer eval``: any experiment on any causal language model, from the command line.

An experiment is a module of this package with

    Settings            a frozen dataclass; its docstring explains the fields, which ``--set`` and the options fill
    QUICK               the fields that ``--quick`` changes: minutes on a small model, to see that all works
    run(lm, settings, samples) -> Result

and perhaps ``NEEDS_MODEL = False``, where ``lm`` is None.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from diff_transformer.checks import require_known
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result

if TYPE_CHECKING:
    from diff_transformer.evals.lm import CausalLM

EXPERIMENTS = {  # in the order of the paper
    "harness": "Tables 1 and 8: lm-evaluation-harness, zero- and five-shot",
    "scaling": "Figure 3: power-law fits and the matched-loss ratio, from a table of runs",
    "long_nll": "Figure 4: negative log-likelihood by position",
    "needle": "Table 2, Figure 5: multi-needle retrieval",
    "allocation": "Table 3, Figure 1: attention on the answer and on the noise",
    "many_shot": "Figures 6, 7 and 9: many-shot classification and its robustness to order",
    "hallucination": "Table 4: contextual hallucination, by a judge",
    "outliers": "Table 5: largest attention logits and hidden states",
    "quantization": "Figure 8: quantised attention logits",
    "associative_recall": "Table 6: loss where the context can be recalled, and elsewhere",
    "ablation": "Table 6: its seven rows, trained at any scale",
    "gradient_flow": "Appendix F: gradients in closed form, and their magnitudes in the pair",
}


def experiment(name: str) -> ModuleType:
    """The module of an experiment.

    Raises:
        ValueError: for a name that is not in ``EXPERIMENTS``.
    """
    require_known("experiment", name, EXPERIMENTS, ", or all")
    return import_module(f"diff_transformer.evals.{name}")


def settings_of(
    name: str, options: dict[str, Any], assignments: Sequence[str] = (), *, quick: bool = False, lenient: bool = False
) -> Any:
    """The ``Settings`` of an experiment: defaults, then ``QUICK``, then ``options`` that are not None, then ``--set``.

    Args:
        options: by field name; an option that the experiment does not have is an error, or with ``lenient`` left out.
        assignments: ``"field=value"``, the value as JSON or text.

    Raises:
        ValueError: for a field that the experiment does not have (naming those it has), or a value of another type.
    """
    module = experiment(name)
    values = dict(module.QUICK) if quick else {}
    known = {field.name for field in dataclasses.fields(module.Settings)}
    given = {key: value for key, value in options.items() if value is not None and not (lenient and key not in known)}
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator:
            raise ValueError(f"{assignment!r} is not an assignment; write key=value, for example samples=20")
        try:
            given[key.strip()] = json.loads(text)
        except json.JSONDecodeError:
            given[key.strip()] = text
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{name} has no setting {', '.join(unknown)}; it has: {', '.join(sorted(known)) or 'none'}")
    values.update({key: _frozen(value) for key, value in given.items()})
    settings = module.Settings(**values)
    for field in dataclasses.fields(settings):
        _check_type(name, field, getattr(settings, field.name))
    return settings


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _check_type(name: str, field: dataclasses.Field, value: Any) -> None:
    """Numbers and truth values are checked against the default; what else a field accepts its experiment checks.

    A field whose default is no example of its values has one in its metadata, as ``"example"``.
    """
    default = field.default
    accepted = {bool: (bool,), int: (int,), float: (int, float), str: (str,), tuple: (tuple,)}.get(type(default))
    wrong = accepted is not None and (
        not isinstance(value, accepted) or (isinstance(value, bool) and type(default) is not bool)
    )
    if wrong:
        example = json.dumps(field.metadata.get("example", default))
        example = f"'{example}'" if '"' in example else example  # a shell would take the inner quotes away
        raise ValueError(f"{name}: {field.name} is {value!r}; give a value like {example}")


def load_lm(
    name_or_path: str, *, device: str | None = None, dtype: str | None = None, batch_size: int = 32
) -> "CausalLM":
    """A causal LM and its tokenizer from a folder, the hub, or a preset (untrained, with a byte tokenizer).

    Args:
        device: "cpu", "cuda", ...; CUDA where there is one if None.
        dtype: "float32", "bfloat16" or "float16"; that of the checkpoint if None.

    Raises: as ``load_model``, which reads safetensors only.
    """
    from diff_transformer.evals.lm import CausalLM
    from diff_transformer.model.loading import load_model

    model, tokenizer = load_model(name_or_path, device=device, dtype=dtype)
    return CausalLM(model, tokenizer, label_of(name_or_path), batch_size=batch_size)


def label_of(name_or_path: str) -> str:
    """What results call a model: the last part of its path that says something (``diff-seed0`` for
    ``members/diff-seed0/run/model``)."""
    parts = [part for part in Path(name_or_path).parts if part not in ("run", "model", "/", ".", "..", "~")]
    return parts[-1] if parts else Path(name_or_path).resolve().name


def run_eval(
    name: str,
    lm: "CausalLM | None",
    settings: Any,
    out: Path,
    *,
    limit: int | None = None,
    resume: bool = False,
    bar: Callable[[str, int, int], None] | None = None,
) -> Result:
    """Run one experiment on one model and save the result to ``out``; finished samples are kept beside it until then.

    Args:
        settings: from ``settings_of``.
        limit: at most so many samples of each part.
        resume: go on with an interrupted run.

    Raises:
        ValueError: for an unknown experiment, or a run to resume that had other settings.
        FileExistsError: if ``out`` exists, or holds an interrupted run and ``resume`` is False.
    """
    module = experiment(name)
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another file")
    everything = {
        "eval": name, "model": None if lm is None else lm.name, "limit": limit, **dataclasses.asdict(settings)
    }  # fmt: skip
    journal = out.with_name(out.name + ".samples.jsonl")
    samples = Samples(journal, settings=everything, limit=limit, resume=resume, bar=bar)
    result = module.run(lm, settings, samples)
    result.save(out)
    samples.done()
    return result
