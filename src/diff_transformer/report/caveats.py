"""What this run cannot show, from its own numbers."""

from diff_transformer.report.markup import Html, tag
from diff_transformer.report.numbers import is_number, number, plural, short
from diff_transformer.report.pair import as_dict, dicts, measured, seeds_by_side

PAPER_PARAMETERS, PAPER_TOKENS = 2.8e9, 1e12


def caveats_section(results: dict) -> Html:
    """A list; each line is there because the run has that limit."""
    items = [tag("li", words) for words in caveats(results)]
    return tag(
        "section",
        tag("h2", "Caveats", id="caveats-title"),
        tag("ul", *items),
        id="caveats",
        aria_labelledby="caveats-title",
    )


def _has_normalised(results: dict) -> bool:
    return any(row.get("variant") == "softmax_norm" for row in dicts(results.get("variants")))


def caveats(results: dict) -> list[str]:
    """The limits of the run, in plain sentences."""
    said = []
    train, pair = as_dict(results.get("train")), as_dict(results.get("pair"))
    size, tokens = as_dict(pair.get("diff")).get("parameters"), train.get("tokens")
    if isinstance(size, int | float) and is_number(size) and size and size < PAPER_PARAMETERS / 2:
        scale = (
            f"The models have {short(size)} parameters, about 1/{number(PAPER_PARAMETERS / size, 0)} of the paper's 3 B"
        )
        if isinstance(tokens, int | float) and is_number(tokens) and tokens:
            scale += f", and saw {short(tokens)} tokens, about 1/{short(PAPER_TOKENS / tokens)} of its 1 T"
        said.append(f"{scale}. What holds at one scale need not hold at the other, in either direction.")
    seeds = max((len(s) for s in seeds_by_side(results).values()), default=0) or len(train.get("seeds") or [])
    if seeds == 1:
        said.append("One seed: nothing here tells a difference between models from one between random draws.")
    elif 1 < seeds < 5:
        said.append(f"{plural(seeds, 'seed')}: intervals over so few seeds are wide and rough.")
    if size and as_dict(as_dict(pair.get("diff")).get("config")).get("head_norm") and not _has_normalised(results):
        said.append(
            "DIFF's heads are normalised, the Transformer's are not. In this project's study at desk scale a "
            "Transformer with such a norm, from .1, had most of DIFF's lead, and the lead shrank as training went on; "
            "the same command with --resume --variants softmax_norm trains one beside this pair, and sets DIFF against "
            "it."
        )
    if train.get("corpus"):
        said.append(f"One corpus ({train['corpus']}); other text may rank the models differently.")
    claims = len(dicts(results.get("claims")))
    if claims > 3:
        said.append(
            f"{claims} claims are judged side by side without correction: expect one to come out by luck now and then."
        )
    if measured(results, "throughput"):
        said.append("Speed depends on machine, shapes and kernels; the ratio carries over no further than those.")
    if dicts(results.get("explorer")):
        said.append(
            "The attention explorer shows single texts, chosen for illustration; the figures average over many."
        )
    said.append("Numbers of the paper marked † are taken from a third party's transcription of it.")
    return said
