"""The first screen: what was compared, what it says in one sentence, and what was run."""

from diff_transformer.lab.stats import SEEDS_FOR_AN_INTERVAL
from diff_transformer.report.charts import NAMES
from diff_transformer.report.markup import Html, join, tag
from diff_transformer.report.numbers import duration, is_number, number, plural, short
from diff_transformer.report.pair import SIDES, as_dict, dicts, seeds_by_side


def verdicts(results: dict) -> dict[str, int]:
    """How many claims have each verdict; an unknown verdict counts as undecided."""
    counts = {"held": 0, "did not hold": 0, "undecided": 0}
    for claim in dicts(results.get("claims")):
        verdict = str(claim.get("verdict"))
        counts[verdict if verdict in counts else "undecided"] += 1
    return counts


def sentence(results: dict) -> str:
    """What the verdicts say together, and of few seeds that they are no more than that."""
    counts = verdicts(results)
    total = sum(counts.values())
    if not total:
        return "No claim was judged in this run."
    seeds = max((len(found) for found in seeds_by_side(results).values()), default=0)
    few = 0 < seeds < SEEDS_FOR_AN_INTERVAL
    where = f"in {'this pair' if seeds == 1 else f'these {seeds} pairs'} of models" if few else "here"
    said = [f"{counts['held']} of {plural(total, 'claim')} of the paper held {where}"]
    if counts["did not hold"]:
        said.append(f"{counts['did not hold']} did not")
    if counts["undecided"]:
        said.append(f"{counts['undecided']} {'is' if counts['undecided'] == 1 else 'are'} undecided")
    more = " Intervals are over examples: another seed may come out otherwise." if few else ""
    return ", ".join(said[:-1]) + (" and " if len(said) > 1 else "") + said[-1] + "." + more


def first_screen(results: dict) -> Html:
    """Title, sentence and facts."""
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in _facts(results)]
    return join(
        [
            tag("h1", results.get("title") or "DIFF and Transformer, compared"),
            tag("p", sentence(results), class_="lead"),
            tag("dl", *facts, class_="facts") if facts else None,
        ]
    )


def _facts(results: dict) -> list[tuple[str, object]]:
    train, pair, where = (as_dict(results.get(key)) for key in ("train", "pair", "provenance"))
    facts: list[tuple[str, object]] = []
    if results.get("recipe"):
        facts.append(("Recipe", results["recipe"]))
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
        threads = f", {where['threads']} threads" if where.get("threads") else ""
        facts.append(("Machine", f"{', '.join(dict.fromkeys(machine))}{threads}"))
    if is_number(results.get("seconds")):
        facts.append(("Time", duration(results["seconds"])))
    return facts
