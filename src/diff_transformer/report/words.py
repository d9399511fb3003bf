"""Sentences of the page: the result in one, facts of the run, and the limits of what it shows."""

from collections.abc import Sequence
from pathlib import Path

from diff_transformer.lab.rows import Rows
from diff_transformer.lab.sides import BASELINE, CONTROL, SOURCE, name_of
from diff_transformer.lab.stats import SEEDS_FOR_AN_INTERVAL
from diff_transformer.lab.verdicts import Outcome, Verdict, Verdicts, diverged

PAPER_PARAMETERS, PAPER_TOKENS = 2.8e9, 1e12
_THAN = {
    Outcome.HELD: "better than", Outcome.FAILED: "worse than", Outcome.INCONCLUSIVE: "not distinguishable from",
}  # fmt: skip


def number(value: float | None, sign: bool = False) -> str:
    """A number with three decimals, fewer for large ones, more for small ones; a dash for none."""
    if value is None or value != value:
        return "–"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 3
    if 0 < size < 0.001:
        digits = 5
    if 0 < size < 1e-5:
        return f"{value:{'+' if sign else ''}.1e}".replace("-", "−")
    return f"{value:{'+' if sign else ''},.{digits}f}".replace("-", "−")


def p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def short(count: float) -> str:
    """A count with its unit: 640 K, 2.8 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * size:  # three digits round up
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def sentence(verdicts: Verdicts, other: str, name: str) -> str:
    """How many claims of the paper held against one side, with what the intervals are over."""
    judged = [of[other] for of in verdicts.values() if other in of and not of[other].quantity.ours]
    if not judged:
        return "No claim of the paper could be judged."
    held, failed = (sum(verdict.outcome is outcome for verdict in judged) for outcome in (Outcome.HELD, Outcome.FAILED))
    untested = sum(bool(verdict.untested) for verdict in judged)
    others = {
        "did not hold": failed,
        "remained inconclusive": len(judged) - held - failed - untested,
        "could not be tested": untested,
    }
    seeds = max(verdict.difference.seeds for verdict in judged)  # speed has one
    few = seeds < SEEDS_FOR_AN_INTERVAL
    where = f"In {'one run' if seeds == 1 else plural(seeds, 'run')} of each model, " if few else ""
    said = f"{where}{held} of {plural(len(judged), 'claim')} of the paper held against the {name}"
    said += "".join(f"; {count} {words}" for words, count in others.items() if count) + "."
    if few:
        return f"{said} Intervals are over examples; another seed may give another result."
    adjusted = [verdict.holm for verdict in judged if verdict.outcome is Outcome.HELD]  # None with few seeds
    significant = sum(p is not None and p <= 0.05 for p in adjusted)
    return f"{said} After Holm's correction {significant} of them hold."


def main_claims(verdicts: Verdicts, sides: dict[str, str]) -> str:
    """DIFF beside each other model in the two claims that matter most: loss, and recall (which is ours)."""
    parts = []
    for id, words in (("loss", "Loss"), ("recall", "Recall from noise (not a claim of the paper)")):
        if of := verdicts.get(id):
            beside = [f"{_than(v)} the {sides[o]} ({number(v.difference.mean, True)})" for o, v in of.items()]
            parts.append(f"{words}: {', '.join(beside)}.")
    return " ".join(parts)


def _than(verdict: Verdict) -> str:
    return "not tested against" if verdict.untested else _THAN[verdict.outcome]


def facts(rows: Rows) -> dict[str, str]:
    """Facts of the run for the first screen."""
    config, machine, about = rows.about("run").get("config") or {}, rows.about("training"), rows.about("comparison")
    train, data, shown = config.get("train", {}), config.get("data", {}), {}
    if config.get("name"):
        shown["Recipe"] = config["name"]
    for side, count in rows["model"].groupby("side", sort=False)["parameters"].max().items():
        if side in ("diff", BASELINE) and count == count:
            shown[f"Parameters, {name_of(side)}"] = short(float(count))
    if train.get("steps") and data.get("length"):
        tokens = train["batch_size"] * data["length"]
        shown["Steps"] = f"{train['steps']:,} of {train['batch_size']} × {data['length']} tokens"
        shown["Tokens"] = short(train["steps"] * tokens)
    if data:
        corpus = data.get("corpus", "")
        shown["Corpus"] = Path(corpus).name or corpus
    seeds = rows["validation"]["seed"].nunique() or rows["model"]["seed"].nunique()
    if seeds:
        shown["Training seeds"] = str(seeds)
    if machine.get("cpu"):
        device = machine["cpu"] if machine.get("device") == "cpu" else machine["device"]
        shown["Machine"] = f"{device}, {plural(int(machine.get('threads') or 1), 'thread')}"
    if about.get("seconds"):
        shown["Time"] = f"{about['seconds'] / 60:.0f} min"
    return shown


def caveats(rows: Rows, verdicts: Verdicts) -> list[str]:
    """The limits of this run, derived from its own numbers, a sentence each."""
    config, said = rows.about("run").get("config") or {}, []
    train, data = config.get("train", {}), config.get("data", {})
    size = rows["model"]["parameters"].max()
    if size and size < PAPER_PARAMETERS / 2:
        scale = f"The models have {short(size)} parameters, about 1/{PAPER_PARAMETERS / size:,.0f} of the paper's 3 B"
        if train.get("steps"):
            tokens = train["steps"] * train["batch_size"] * data["length"]
            scale += f", and saw {short(tokens)} tokens, about 1/{short(PAPER_TOKENS / tokens)} of its 1 T"
        said.append(f"{scale}. A result at one scale need not hold at the other, in either direction.")
    if lost := sorted(diverged(rows)):
        said.append(f"Training diverged: {', '.join(f'{name_of(side)}, seed {seed}' for side, seed in lost)}.")
    seeds = rows["validation"]["seed"].nunique()
    if seeds == 1:
        said.append("One seed cannot separate a difference between models from a difference between seeds.")
    elif 2 < seeds < 5:
        said.append(f"{seeds} seeds: intervals over so few seeds are wide.")
    if "diff" in rows.sides and BASELINE in rows.sides and CONTROL not in rows.sides and SOURCE not in rows.sides:
        said.append(
            "DIFF normalises its heads, the Transformer does not. To see what the norm does alone, run the same "
            f"command with --resume --variants {CONTROL}."
        )
    if SOURCE in rows.sides:
        said.append("All models start with the logits of one pretrained Transformer, measured once before training.")
    if data:
        said.append("One corpus; other text may rank the models differently.")
    if len(verdicts) > 3 and all(verdict.few for of in verdicts.values() for verdict in of.values()):
        said.append("The claims are tested without a correction for multiple tests; some may hold or fail by chance.")
    if len(rows["throughput"]):
        said.append("Speed depends on the machine, shapes and kernels.")
    said.append("The paper's numbers marked † come from a third party's transcription.")
    return said


def examples_of(rows: Rows, experiment: str, count: int = 24) -> tuple[list[str], list[list[object]]]:
    """Columns and evenly spread rows of an experiment that has texts, for a table; empty without texts."""
    frame = rows[experiment]
    texts = [name for name in ("prompt", "expected", "got", "output") if name in frame]
    if not texts or not len(frame):
        return [], []
    frame = frame.dropna(subset=texts[:1])
    shown_rows = min(count, len(frame))
    places = [len(frame) * i // shown_rows for i in range(shown_rows)]
    shown: Sequence[str] = [*texts, *(["score"] if "score" in frame else [])]
    cells = [
        [_cell(name, value) for name, value in zip(shown, values, strict=True)]
        for values in frame.iloc[places][list(shown)].itertuples(index=False)
    ]
    return ["model", *shown], [[side, *of] for side, of in zip(frame.iloc[places]["side"], cells, strict=True)]


def _cell(name: str, value: object) -> object:
    if isinstance(value, str):
        return f"… {value[-240:]}" if name == "prompt" and len(value) > 240 else value[:160]
    return number(value) if isinstance(value, float) else value
