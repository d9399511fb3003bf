"""The text around the figures of a comparison: first screen, method and limits."""

import json

from diff_transformer.lab.sides import CONTROL, name_of
from diff_transformer.lab.stats import SEEDS_FOR_AN_INTERVAL
from diff_transformer.report.charts import NAMES
from diff_transformer.report.claims import control_of, forest, known_verdict, of_paper, one_run
from diff_transformer.report.figure import folded
from diff_transformer.report.markup import DASH, Html, duration, is_number, join, number, plural, short, table, tag
from diff_transformer.report.models import SIDES, Results, as_dict, dicts, seeds_by_side


def verdicts(results: dict) -> dict[str, int]:
    """How many claims of the paper have each verdict; an unknown verdict counts as undecided."""
    counts = {"held": 0, "did not hold": 0, "undecided": 0}
    for claim in of_paper(results):
        verdict = str(claim.get("verdict"))
        counts[verdict if verdict in counts else "undecided"] += 1
    return counts


_OTHERWISE = {"did not hold": "against it", "undecided": "stayed undecided"}


def sentence(results: Results) -> str:
    """One sentence: how many claims held. With few seeds it says what the intervals are over."""
    counts, claims = verdicts(results.about), of_paper(results.about)
    total = sum(counts.values())
    if not total:
        return "No claim was judged in this run."
    seeds = max((len(found) for found in seeds_by_side(results).values()), default=0)
    more = " Intervals are over examples; another seed may give another result."
    if all(map(one_run, claims)):
        said = [f"In one run, {counts['held']} of {plural(total, 'claim')} of the paper came out in its favour"]
        said += [f"{counts[name]} {words}" for name, words in _OTHERWISE.items() if counts[name]]
        return f"{_listed(said)}.{more}"
    few = 0 < seeds < SEEDS_FOR_AN_INTERVAL
    where = f"in these {seeds} pairs of models" if few else "here"
    said = [f"{counts['held']} of {plural(total, 'claim')} of the paper held {where}"]
    if counts["did not hold"]:
        said.append(f"{counts['did not hold']} did not")
    if counts["undecided"]:
        said.append(f"{counts['undecided']} {'is' if counts['undecided'] == 1 else 'are'} undecided")
    return f"{_listed(said)}.{more if few else ''}"


def _listed(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


_THAN = {"held": "better than", "did not hold": "worse than", "undecided": "not distinguishable from"}


def main_claims(results: dict) -> str:
    """DIFF beside the Transformer and the control in the two claims that matter most: loss and (ours) recall."""
    said, claims = [], {claim.get("id"): claim for claim in dicts(results.get("claims"))}
    for name, words in (("loss", "Loss"), ("recall", "Recall from noise (not a claim of the paper)")):
        if name in claims:
            control = as_dict(claims[name].get("control"))
            others = {NAMES["softmax"]: claims[name]} | ({str(control_of([claims[name]])): control} if control else {})
            beside = (f"{_THAN[known_verdict(of)]} the {other}{_by(of)}" for other, of in others.items())
            said.append(f"{words}: {', '.join(beside)}.")
    return " ".join(said)


def _by(judged: dict) -> str:
    mean = as_dict(judged.get("difference")).get("mean")
    return f" ({number(mean, 3, sign=True)})" if is_number(mean) else ""


def first_screen(results: Results) -> Html:
    """Title, sentence and facts."""
    facts, about = [tag("div", tag("dt", name), tag("dd", value)) for name, value in _facts(results)], results.about
    return join(
        [
            tag("h1", about.get("title") or "DIFF and Transformer, compared"),
            tag("p", sentence(results), class_="lead"),
            tag("p", main_claims(about), class_="lead") if main_claims(about) else None,
            *(
                tag("p", f"{name_of(side)}. {main_claims({'claims': claims})}", class_="lead")
                for side, claims in as_dict(about.get("claims_of")).items()
            ),
            forest(about),
            tag("dl", *facts, class_="facts") if facts else None,
        ]
    )


def _facts(results: Results) -> list[tuple[str, object]]:
    about = results.about
    train, pair, where = (as_dict(about.get(key)) for key in ("train", "pair", "provenance"))
    facts: list[tuple[str, object]] = []
    if about.get("recipe"):
        facts.append(("Recipe", about["recipe"]))
    counts = [as_dict(pair.get(side)).get("parameters") for side in SIDES]
    for side, count in zip(SIDES, counts, strict=True):
        if is_number(count):
            facts.append((f"{NAMES[side]} parameters", tag("span", short(count), title=number(count, 0))))
    if is_number(train.get("steps")):
        shape = [f"{number(train[k], 0)}" for k in ("batch_size", "sequence_length") if is_number(train.get(k))]
        each = f" of {' × '.join(shape)} tokens" if len(shape) == 2 else ""
        facts.append(("Steps", f"{number(train['steps'], 0)}{each}"))
    if is_number(train.get("tokens")):
        facts.append(("Tokens", f"{short(train['tokens'])} each"))
    seeds = train.get("seeds") or sorted({s for found in seeds_by_side(results).values() for s in found})
    if seeds:
        facts.append(("Seeds", f"{len(seeds)} (seed {seeds[0]})" if len(seeds) == 1 else str(len(seeds))))
    machine = [str(where[k]) for k in ("device", "cpu") if where.get(k)]
    if len(machine) > 1 and machine[0] == "cpu":
        machine = machine[1:]
    if machine:
        count = where.get("threads")  # of any type, in a record by another hand
        threads = f", {count} thread{'' if count == 1 else 's'}" if count else ""
        facts.append(("Machine", f"{', '.join(dict.fromkeys(machine))}{threads}"))
    if is_number(about.get("seconds")):
        facts.append(("Time", duration(about["seconds"])))
    return facts


DEFINITIONS = {
    "Loss": "mean cross-entropy of the next token on held-out text, in nats per token.",
    "AR-Hit and others": "an AR-Hit token ends an n-gram that occurred earlier in the same context and is rare in "
    "the training text. Others are all remaining tokens.",
    "Needle accuracy": "share of the R numbers asked for that greedy decoding gives exactly and in order. The "
    "first needle asked for is at the given depth, the others anywhere. Chance is the score of guessing.",
    "Attention allocation": "from the last position of a retrieval prompt, each head's weights (for DIFF of A₁ − λ A₂) "
    "are divided by the sum of their magnitudes. Answer is the share on the sentence asked for; noise is the share "
    "on the other text, without the first token and the question.",
    "Largest activations": "magnitudes of the attention logits before softmax (of both maps of DIFF) and of the "
    "residual stream after each layer.",
    "Tokens per second": "forward + backward and forward alone, on equal batches, on the machine given here.",
    "Difference": "DIFF minus Transformer, paired by seed. If an interval is over examples, it covers the difference "
    "between these trained models; another seed may give another difference.",
}


def method_section(results: dict) -> Html:
    """The information needed to repeat the run and to read its numbers."""
    parts = [
        _columns(_training(results), _provenance(results)),
        _columns(_parameters(results), _pair(results)),
        tag("h3", "Definitions"),
        tag("dl", *(tag("div", tag("dt", k), tag("dd", v)) for k, v in DEFINITIONS.items()), class_="definitions"),
    ]
    return tag(
        "section",
        tag("h2", "How this was measured", id="method-title"),
        _command(results),
        folded("Settings, machine, parameters and definitions", *(p for p in parts if p is not None)),
        id="method",
        aria_labelledby="method-title",
    )


def _columns(*parts: Html | None) -> Html:
    """Side by side on a wide screen."""
    return tag("div", *(tag("div", p) for p in parts if p is not None), class_="columns")


def _command(results: dict) -> Html | None:
    if not results.get("command"):
        return None
    code = tag("pre", tag("code", results["command"]), tabindex="0", role="region", aria_label="Command")
    return join([tag("p", "This page is the result of one command:"), code])


def _training(results: dict) -> Html | None:
    train = as_dict(results.get("train"))
    if not train:
        return None
    whole = train.get("config")
    rows: list[list[object]] = [[k.replace("_", " "), _setting(v)] for k, v in train.items() if k != "config"]
    shown = [tag("h3", "Training"), table(["both models", "value"], rows, "Training", numeric=False)]
    if whole:
        written = tag(
            "pre", json.dumps(whole, indent=1, default=str), tabindex="0", role="region", aria_label="Settings"
        )
        shown.append(tag("details", tag("summary", "Every setting"), written, class_="more"))
    return join(shown)


def _setting(value: object) -> str:
    """A mixture as shares, a list with commas, a count with separators."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {100 * v:.0f} %" if is_number(v) else f"{k} {v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(str(v) for v in value)
    return number(value, 0) if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _pair(results: dict) -> Html | None:
    configs = [as_dict(as_dict(as_dict(results.get("pair")).get(side)).get("config")) for side in SIDES]
    if not all(configs):
        return None
    keys = sorted(set(configs[0]) | set(configs[1]))
    differ = [k for k in keys if configs[0].get(k, DASH) != configs[1].get(k, DASH)]
    rows: list[list[object]] = [[k, *(config.get(k, DASH) for config in configs)] for k in differ]
    same: list[list[object]] = [[k, configs[0][k]] for k in keys if k not in differ]
    equal = table(["field", "both"], same, "Equal fields", numeric=False)
    return join(
        [
            tag("h3", "The pair"),
            tag("p", f"{len(differ)} of {len(keys)} fields of the configuration differ."),
            table(["field", *NAMES.values()], rows, "Fields that differ", numeric=False) if rows else None,
            tag("details", tag("summary", f"The {len(same)} equal fields"), equal, class_="more"),
        ]
    )


def _parameters(results: dict) -> Html | None:
    pair = as_dict(results.get("pair"))
    models = [as_dict(pair.get(side)) for side in SIDES]
    if not any(is_number(m.get("parameters")) for m in models):
        return None
    parts = [as_dict(m.get("parameters_by_part")) for m in models]
    rows = [_compared(part, [p.get(part, 0) for p in parts]) for part in dict.fromkeys([*parts[0], *parts[1]])]
    rows.append(_compared("all parameters", [m.get("parameters") for m in models]))
    if any(is_number(m.get("flops_per_token")) for m in models):
        rows.append(_compared("FLOPs per token", [m.get("flops_per_token") for m in models]))
    head: list[object] = ["", *NAMES.values(), "DIFF / Transformer"]
    return join([tag("h3", "Parameters and arithmetic, computed"), table(head, rows, "Parameters by part")])


def _compared(name: str, values: list) -> list[object]:
    ratio = values[0] / values[1] if all(is_number(v) for v in values) and values[1] else None
    shown = [short(v) if is_number(v) and v >= 1e9 else number(v, 0) for v in values]
    return [name, *shown, number(ratio, 4)]


def _provenance(results: dict) -> Html | None:
    facts = {str(k): v for k, v in as_dict(results.get("provenance")).items() if v not in (None, "")}
    if results.get("created"):
        facts["created"] = results["created"]
    if not facts:
        return None
    rows: list[list[object]] = [[name.replace("_", " "), value] for name, value in facts.items()]
    return join([tag("h3", "Machine and versions"), table(["", "value"], rows, "Machine and versions", numeric=False)])


PAPER_PARAMETERS, PAPER_TOKENS = 2.8e9, 1e12


def caveats_section(results: Results) -> Html:
    """The limits of this run as a list."""
    items = [tag("li", words) for words in caveats(results)]
    return tag(
        "section",
        tag("h2", "Caveats", id="caveats-title"),
        tag("ul", *items),
        id="caveats",
        aria_labelledby="caveats-title",
    )


def caveats(results: Results) -> list[str]:
    """The limits of this run, derived from its own numbers, one sentence each."""
    said, about = [], results.about
    train, pair, claims = as_dict(about.get("train")), as_dict(about.get("pair")), dicts(about.get("claims"))
    size, tokens = as_dict(pair.get("diff")).get("parameters"), train.get("tokens")
    if isinstance(size, int | float) and is_number(size) and size and size < PAPER_PARAMETERS / 2:
        scale = (
            f"The models have {short(size)} parameters, about 1/{number(PAPER_PARAMETERS / size, 0)} of the paper's 3 B"
        )
        if isinstance(tokens, int | float) and is_number(tokens) and tokens:
            scale += f", and saw {short(tokens)} tokens, about 1/{short(PAPER_TOKENS / tokens)} of its 1 T"
        said.append(f"{scale}. A result at one scale need not hold at the other, in either direction.")
    seeds = max((len(s) for s in seeds_by_side(results).values()), default=0) or len(train.get("seeds") or [])
    if seeds == 1:
        said.append(
            "One seed: these results cannot separate a difference between models from a difference between seeds."
        )
    elif 1 < seeds < 5:
        said.append(f"{plural(seeds, 'seed')}: intervals over so few seeds are wide.")
    if size and as_dict(as_dict(pair.get("diff")).get("config")).get("head_norm") and CONTROL not in results.sides():
        said.append(
            "DIFF normalises its heads, the Transformer does not. In this project's desk study, the Transformer + "
            "head norm (starting at 0.1) had most of DIFF's lead, and the lead shrank with training. To add that model "
            "to this comparison, run the same command with --resume --variants softmax_norm."
        )
    if about.get("source"):
        said.append(
            f"The models start with the logits of {about['source']}, so the Transformer before training is measured "
            "once and stands for all. The wider Transformer has as many parameters as DIFF, and more than DIFF V2."
        )
    if train.get("corpus"):
        said.append(f"One corpus ({train['corpus']}); other text may rank the models differently.")
    if len(claims) > 3 and not any(is_number(claim.get("p_value")) for claim in claims):
        said.append(
            f"{len(claims)} claims are tested without a correction for multiple tests, so some may hold or fail by "
            "chance."
        )
    if any(results.measurements("throughput")):
        said.append("Speed depends on the machine, shapes and kernels; other machines or shapes give another ratio.")
    if any(record.rows.get("explorer") for record in results.records):
        said.append("The attention explorer shows single texts chosen as illustrations; the figures average over many.")
    said.append("The paper's numbers marked † come from a third party's transcription.")
    return said
