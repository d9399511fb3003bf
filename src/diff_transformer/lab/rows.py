"""Tidy rows: the only form of a result. A file of rows is JSON lines in gzip.

A row is one observation: the key columns, and the columns of its experiment, so that a ratio of two columns needs no
pivot. Curves of training, settings and parameter counts are rows too. Joining files is ``cat``; ``zcat FILE | jq``
reads one. Numbers keep every bit; NaN and infinity are written as null.

Two seeds must not be mixed up. ``seed`` is the *training seed*: another one is another model. ``data_seed`` is that of
one measurement: another one is the same model on other examples, which counts as more examples.
"""

import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diff_transformer.checks import listed
from diff_transformer.durable import write_whole
from diff_transformer.errors import UserError
from diff_transformer.lab.sides import in_order

if TYPE_CHECKING:
    import pandas as pd

FILE = "rows.jsonl.gz"  # of a finished run, in its folder
REQUEST = "request.json"  # its ``RunSpec``
ENDING = ".jsonl.gz"
SWEEPS = "sweep/"  # begins the settings of sweeps of learning rates, which pages and tables leave out
RECALL = "recall"  # key-value recall as in training, for runs whose mixture has it
EXPLORER = "explorer"  # attention maps for the report
MODEL = ("setting", "side", "seed")
KEYS = (*MODEL, "data_seed", "experiment", "example")
UNIT = (*MODEL, "data_seed", "example")  # one example of an experiment
TABLES: dict[str, tuple[str, ...]] = {  # columns that quantities and figures read; an experiment may have more
    "needle": ("n", "r", "length", "depth", "score"),
    "allocation": ("depth", "answer", "noise"),
    "allocation_heads": ("layer", "head", "answer", "noise"),
    "associative_recall": ("loss", "ar_hit_sum", "ar_hit_count", "others_sum", "others_count"),
    "outliers": ("logits_top1", "logits_median", "hidden_top1", "hidden_median"),
    "outliers_top": ("kind", "layer", "k", "value"),  # k = 0: the median; layer = -1: all layers
    "quantization": ("bits", "loss"),
    "quantization_choice": ("bits", "score"),
    "long_nll": ("end", "sum", "count"),  # a row for each bin of positions of a document
    "recall": ("length", "hits", "questions"),
    "recall_first": ("right", "answer", "noise"),  # the first question of a row
    "many_shot": ("shots", "order", "order_seed", "score"),
    "hallucination": ("set", "score"),
    "harness": ("task", "shots", "score"),
    "ruler": ("task", "length", "score"),
    "gradient_flow": ("state", "part", "layer", "rms"),
    "throughput": ("train_tokens_per_second", "forward_tokens_per_second"),
    "training": ("step", "loss", "grad_norm", "tokens_per_second"),
    "validation": ("step", "loss"),
    "recall_curve": ("step", "accuracy"),
    "needles_curve": ("step", "accuracy"),
    "sources": ("step", "source", "loss"),
    "lambda": ("step", "layer", "value"),
    "gradients": ("median", "largest", "spikes"),
    "model": ("parameters", "flops_per_token", "kv_bytes_per_token", "intermediate_size"),
    "explorer": ("entry",),  # attention maps of one text
    "anatomy": ("layer", "head", "sink", "keys", "negative_mass", "distance", "cka", "importance"),
    "hessian": ("rank", "value"),
    "scaling": ("fit", "exponent", "ratio"),  # of a model: loss against "parameters" or "tokens"
    "scaling_runs": ("fit", "x", "loss", "fitted"),
    "about": ("of", "key", "value"),  # a setting of the run ("run", "training"), or of an experiment
}
PART_OF = {  # tables that an experiment of another name writes
    "allocation_heads": "allocation", "outliers_top": "outliers", "quantization_choice": "quantization",
    "recall_first": "recall", "hessian": "anatomy", "scaling_runs": "scaling",
}  # fmt: skip
CURVES = ("training", "validation", "recall_curve", "needles_curve", "sources", "lambda")
_TEXT = {"setting", "side", "experiment", "example", "kind", "of", "key", "order", "set", "task", "state", "part"}
_TEXT |= {"source", "fit", "entry", "prompt", "expected", "got"}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


def clean(value: Any) -> Any:
    """The value, its strings without control characters and lone surrogates, which neither XML nor UTF-8 can hold."""
    if isinstance(value, str):
        return _clean_text(value)
    if isinstance(value, dict):
        return {clean(key): clean(of) for key, of in value.items()}
    return [clean(of) for of in value] if isinstance(value, list) else value


@lru_cache(maxsize=2**14)  # most texts are names, in every row
def _clean_text(text: str) -> str:
    return _CONTROL.sub("\ufffd", text)


class Rows:
    """Tables of rows as pandas frames, one an experiment.

    ``rows["needle"]`` is the frame of an experiment, with the columns of ``KEYS`` and of ``TABLES``; it is empty if
    nothing was measured.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        by_experiment: dict[str, list[dict]] = defaultdict(list)
        for row in rows:
            by_experiment[row["experiment"]].append({_clean_text(key): clean(value) for key, value in row.items()})
        self.frames = {name: _frame(name, of) for name, of in by_experiment.items()}

    def __getitem__(self, experiment: str) -> "pd.DataFrame":
        if experiment not in self.frames:
            self.frames[experiment] = _frame(experiment, [])
        return self.frames[experiment]

    @property
    def experiments(self) -> list[str]:
        """Names of the experiments that have rows."""
        return [name for name, frame in self.frames.items() if len(frame) and name != "about"]

    @cached_property
    def sides(self) -> list[str]:
        """The models that are compared: the pair and its relatives first, others in the order of their rows."""
        return in_order(dict.fromkeys(side for frame in self.frames.values() for side in frame["side"] if side))

    @cached_property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(setting for frame in self.frames.values() for setting in frame["setting"]))

    @property
    def studied(self) -> list[str]:
        """The settings that have models, without sweeps of learning rates; with them if there are no others."""
        known = [setting for setting in self.settings if self.only(setting=setting).sides]
        return [setting for setting in known if not setting.startswith(SWEEPS)] or known

    def only(self, **where: Any) -> "Rows":
        """The rows whose columns have the given values, or one of a list of values."""
        chosen = Rows()
        for name, frame in self.frames.items():
            for column, value in where.items():
                frame = frame[frame[column].isin(value if isinstance(value, list | tuple | set) else [value])]
            chosen.frames[name] = frame
        return chosen

    def joined(self, other: "Rows") -> "Rows":
        """The rows of both."""
        import pandas as pd

        chosen = Rows()
        for name in dict.fromkeys([*self.frames, *other.frames]):
            parts = [frame for frame in (self[name], other[name]) if len(frame)]
            chosen.frames[name] = pd.concat(parts, ignore_index=True) if parts else self[name]
        return chosen

    def about(self, of: str, **where: Any) -> dict[str, Any]:
        """The settings of the run ("run", "training"), or of an experiment; the first value of each."""
        frame = self["about"]
        for column, value in {"of": of, **where}.items():
            frame = frame[frame[column] == value]
        frame = frame.drop_duplicates("key")
        return dict(zip(frame["key"], frame["value"], strict=True))

    def __len__(self) -> int:
        return sum(map(len, self.frames.values()))


def _frame(name: str, rows: list[dict]) -> "pd.DataFrame":
    import pandas as pd

    frame = pd.DataFrame(rows)
    frame = frame.reindex(columns=list(dict.fromkeys([*KEYS, *TABLES.get(name, ()), *frame.columns])))
    numbers = [c for c in TABLES.get(name, ("score",)) if c not in _TEXT and not (name == "about" and c == "value")]
    for column in ("seed", "data_seed", *numbers):
        if column in frame:
            frame[column] = pd.to_numeric(frame[column], errors="coerce")
    return frame


def row(
    experiment: str,
    side: str,
    seed: int = 0,
    setting: str = "",
    *,
    example: Any = 0,
    data_seed: int = 0,
    **columns: Any,
) -> dict[str, Any]:
    """A row: its key columns, and the columns of its experiment."""
    return dict(zip(KEYS, (setting, side, seed, data_seed, experiment, example), strict=True)) | columns


def rows_of(
    experiment: str, rows: Iterable[Mapping], about: Mapping[str, Any], side: str, seed: int = 0, setting: str = ""
) -> Iterator[dict]:
    """The rows of one measurement of one model.

    Args:
        rows, about: as ``evals.types.Result`` has them. A column called like a key column gets an underscore.
        side, seed, setting: of the model; without a side, rows have theirs. ``seed`` is the training seed; the data
            seed is that of ``about``.
    """
    data_seed = about["seed"] if isinstance(about.get("seed"), int) else 0
    for place, values in enumerate(rows):
        table, example = values.get("experiment", experiment), values.get("example", place)
        required = ("experiment", "example") if side else ("experiment", "example", "side")
        columns = {key: value for key, value in values.items() if key not in required}
        columns = {f"{key}_" if key in KEYS else key: value for key, value in columns.items()}
        yield {**row(table, side or values["side"], seed, setting, example=example, data_seed=data_seed), **columns}
    for of, keys in (("model", ("path", "weights", "attention", "dtype")), (experiment, about)):
        for key in keys:
            if of == experiment or about.get(key):
                fact = {"of": of, "key": key, "value": about[key]}
                yield row("about", side, seed, setting, example=key, data_seed=data_seed, **fact)


def encode(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """The content of a file of rows. Two contents one after the other are the content of both."""
    lines = (json.dumps(_plain(row), separators=(",", ":")) + "\n" for row in rows)
    return gzip.compress("".join(lines).encode(), 6, mtime=0)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of numpy or torch
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(of) for key, of in value.items()}
    return [_plain(of) for of in value] if isinstance(value, list | tuple) else value


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of rows, whole or not at all; create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, encode(rows))


def read_file(path: Path) -> list[dict]:
    """The rows of one file, as they were written.

    Raises:
        UserError: if there is no such file, or it is not a file of rows.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; give one that compare, study or eval wrote, or its folder") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path} is no file of rows ({error}); give one that compare, study or eval wrote") from None
    if not rows or not all(isinstance(row, dict) and {"experiment", *MODEL} <= row.keys() for row in rows):
        raise UserError(f"{path} holds no rows of an experiment; give a file that compare, study or eval wrote")
    return rows


def read_rows(*sources: Path | str, after: Rows | None = None) -> Rows:
    """The rows of files, and of all files in folders of ``compare``, ``study`` and ``eval``; those of ``after`` first.

    Models are told apart by their path and the fingerprint of their weights, never by name alone: two that share a name
    get longer ones. The same measurement of a model in two files counts once; one with other settings gets their
    difference in the name of its side, so that the two are not averaged.

    Raises:
        UserError: if a source does not exist, or holds no rows.
    """
    frames = after.frames.values() if after else ()
    parts = _grouped([row for frame in frames for row in frame.to_dict("records")], MODEL)  # of each model in each file
    for source in map(Path, sources):
        paths = files_of(source) if source.is_dir() else [source]
        if not paths:
            raise UserError(f"{source} holds no results; write some with `diff-transformer compare`, `study` or `eval`")
        parts += [of_model for path in paths for of_model in _grouped(read_file(path), MODEL)]
    return Rows(row for of in _told_apart(parts) for row in of)


def files_of(folder: Path) -> list[Path]:
    """The files of rows below ``folder``, sorted; without those of unfinished parts of runs."""
    finished = {path.parent for path in folder.rglob(FILE) if (path.parent / REQUEST).exists()}
    every = sorted(folder.rglob(f"*{ENDING}"))
    return [path for path in every if path.name == FILE or not finished & {*path.parents}]


def _told_apart(parts: list[list[dict]]) -> Iterator[list[dict]]:
    """The rows of each part, with names of sides that tell models and settings apart, each measurement once."""
    identities = [_identity(rows) for rows in parts]
    paths = {(*of[:3], of[4]): of[3] for of in identities if of[3] and of[4]}  # one measured in memory has no path
    identities = [(*of[:3], of[3] or paths.get((*of[:3], of[4]), ""), of[4]) for of in identities]
    models: dict[tuple, dict[tuple, None]] = defaultdict(dict)  # setting, side, seed -> the models of that name
    for identity in identities:
        models[identity[:3]].setdefault(identity[3:])
    seen: dict[tuple, list[tuple[dict, int]]] = defaultdict(list)  # measurement -> its settings and data seeds
    for rows, identity in zip(parts, identities, strict=True):
        side = _longer(identity[1], *identity[3:], [*models[identity[:3]]])
        for of in _grouped(rows, ("experiment", "data_seed", "of")):
            name = of[0]["of"] if of[0]["experiment"] == "about" else of[0]["experiment"]
            settings = _settings(rows, PART_OF.get(name, name))
            known, measured = seen[*identity, of[0]["experiment"], name], (settings, of[0].get("data_seed", 0))
            if measured in known:
                continue
            known.append(measured)
            first, _ = known[0]
            different = [key for key in {**first, **settings} if first.get(key) != settings.get(key)]
            more = "; ".join(f"{key} {told(settings.get(key))}" for key in different)
            yield [{**row, "side": f"{side} ({more})" if more and side else side} for row in of]


def _identity(rows: list[dict]) -> tuple:
    """Setting, side, training seed, path and fingerprint of the model of a file."""
    about = {row["key"]: row["value"] for row in rows if row["experiment"] == "about" and row["of"] == "model"}
    first = rows[0]
    return (
        first.get("setting", ""), first["side"], first.get("seed", 0),
        str(about.get("path") or ""), str(about.get("weights") or ""),
    )  # fmt: skip


def _longer(side: str, path: str, weights: str, models: list[tuple[str, str]]) -> str:
    """``side``, or as much of the end of ``path`` as tells it from the other ``models`` (paths and fingerprints)."""
    if not path and not weights:
        return side
    if any(other == path and theirs != weights for other, theirs in models):  # trained on in place
        return f"{side} ({weights[:8]})"
    others = [other for other, _ in models if other and other != path]
    own = Path(path).parts
    for count in range(1, len(own) + 1) if others else ():
        if all(Path(other).parts[-count:] != own[-count:] for other in others):
            return "/".join(own[-count:])
    return path if others and path else side


def _grouped(rows: list[dict], columns: tuple[str, ...]) -> list[list[dict]]:
    groups: dict[tuple, list[dict]] = defaultdict(list)
    for each in rows:
        groups[tuple(each.get(column) for column in columns)].append(each)
    return [*groups.values()]


CIRCUMSTANCES = (  # facts that may differ between repeated measurements
    "seed", "counts", "package_version", "commit", "device", "cpu", "threads", "torch", "transformers", "python",
    "platform", "date", "seconds", "path", "weights", "run", "class", "positions",
)  # fmt: skip


SETTINGS = (  # of a measurement; models are compared if they agree in these
    "length", "lengths", "depths", "needles", "samples", "digits", "wording", "scoring", "chat_template", "judge",
    "bits", "batch", "repeats", "shots", "counts", "part", "corpus", "data", "cells", "tasks", "rows",
    "order_seeds", "pairs", "symbols", "noise_symbols", "questions", "distractors", "ngram", "frequent_share",
    "training_bytes", "summary_tokens", "answer_tokens", "batch_size",
)  # fmt: skip


def told(value: Any) -> str:
    """The value of a setting as readers see it: ``0, 0.5, 1`` or ``(1, 1), (4, 2)``."""
    if isinstance(value, list | tuple):
        return listed([f"({told(each)})" if isinstance(each, list | tuple) else told(each) for each in value])
    return f"{value:g}" if isinstance(value, float) else str(value)


def _settings(rows: list[dict], experiment: str) -> dict[str, Any]:
    return {
        row["key"]: row["value"]
        for row in rows
        if row["experiment"] == "about" and row["of"] == experiment and row["key"] not in CIRCUMSTANCES
    }


def finished(folder: Path) -> bool:
    """True if the folder of a run holds its rows."""
    return (folder / FILE).exists()
