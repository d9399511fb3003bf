"""How this was measured: the command, the pair, the parameters, the definitions, the machine."""

import json

from diff_transformer.report.charts import NAMES
from diff_transformer.report.markup import Html, join, table, tag
from diff_transformer.report.numbers import DASH, is_number, number, short
from diff_transformer.report.pair import SIDES, as_dict

DEFINITIONS = {
    "Loss": "mean cross-entropy of the next token on held-out text, in nats per token.",
    "AR-Hit and others": "an AR-Hit token ends an n-gram that occurred earlier in the same context and is not frequent "
    "in the training text; others are all the rest.",
    "Needle accuracy": "share of the R numbers asked for that greedy continuation gives exactly and in order. The "
    "first needle asked for stands at the depth named, the others anywhere. Chance is the score of guessing.",
    "Attention allocation": "from the last position of a retrieval prompt, each head's weights (for DIFF of A₁ − λ A₂) "
    "are divided by the sum of their magnitudes. Answer is the share on the sentence asked for; noise is the share "
    "on the other text, without the first token and the question.",
    "Largest activations": "magnitudes of the attention logits before softmax (of both maps of DIFF) and of the "
    "residual stream after each layer.",
    "Tokens per second": "forward and backward, and forward alone, on equal batches, on the machine named here.",
    "Difference": "DIFF minus Transformer, paired by seed. Where the interval is over examples it says how sure the "
    "difference between these trained models is, not how another seed would come out.",
}


def method_section(results: dict) -> Html:
    """Everything needed to repeat the run and to read its numbers."""
    parts = [
        tag("h2", "How this was measured", id="method-title"),
        _command(results),
        _columns(_training(results), _provenance(results)),
        _columns(_parameters(results), _pair(results)),
        tag("h3", "Definitions"),
        tag("dl", *(tag("div", tag("dt", k), tag("dd", v)) for k, v in DEFINITIONS.items()), class_="definitions"),
    ]
    return tag("section", *(p for p in parts if p is not None), id="method", aria_labelledby="method-title")


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
    return join([tag("h3", "Parameters and arithmetic"), table(head, rows, "Parameters by part")])


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
