"""Many-shot classification on fakes of known outcome, and on tiny models scored by another route."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numbers_of import mean
from tiny_models import tiny_lm

from diff_transformer.data.tasks.types import Labelled, LabelledSet
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.evals.many_shot import Settings, alternate, evaluate_many_shot
from diff_transformer.lab.quantities import QUANTITIES
from diff_transformer.lab.rows import Rows, rows_of

LABELS = ("river", "city", "mountain")
TRAIN = tuple(Labelled(f"train {i}: say", LABELS[i % 3]) for i in range(30))
TEST = tuple(Labelled(f"test {i}: what?", LABELS[i % 3 if i % 2 else 0]) for i in range(12))
DATA = LabelledSet("places", TRAIN, TEST, "Question", "Type")
GOLD = {example.text: example.label for example in TEST}


class Seen:
    """A cache that holds the tokens themselves."""

    layers = ()

    def __init__(self, ids):
        self.ids = ids

    def reorder_cache(self, rows):
        self.ids = self.ids[rows]


class Answering:
    """Continues each prompt with ``answer(prompt)``; gives all labels the same score if that is None."""

    dtype, config = torch.float32, SimpleNamespace()

    def __init__(self, answer):
        self.answer, self.read = answer, []

    def __call__(self, input_ids, past_key_values=None, use_cache=True, logits_to_keep=0):
        self.read.append(tuple(input_ids.shape))
        ids = input_ids if past_key_values is None else torch.cat((past_key_values.ids, input_ids), 1)
        first = ids.shape[1] - (logits_to_keep or input_ids.shape[1])
        logits = torch.zeros(len(ids), ids.shape[1] - first, 258)
        for row in range(len(ids)):
            for place in range(first, ids.shape[1]):
                text = bytes(ids[row, : place + 1].tolist()).decode()
                prompt, _, written = text.rpartition("Type:")
                said = self.answer(prompt) if prompt else None
                if said is not None and f" {said}\n".startswith(written) and f" {said}\n" != written:
                    logits[row, place - first, ord(f" {said}\n"[len(written)])] = 30.0
        return SimpleNamespace(logits=logits, past_key_values=Seen(ids))


class Reader:
    """A model that is a function of the prompt."""

    name, tokenizer, batch_size, device, positions = "reader", byte_tokenizer(), 5, torch.device("cpu"), 4096
    in_parts = True

    def __init__(self, answer):
        self.model = Answering(answer)

    @property
    def read(self):
        return self.model.read


def asked(prompt: str) -> str:
    return prompt.rstrip("\n").rpartition("Question: ")[2]


def shown(prompt: str) -> list[tuple[str, str]]:
    """The examples of a prompt, as (text, label)."""
    lines = prompt.splitlines()[:-1]
    return [
        (a.removeprefix("Question: "), b.removeprefix("Type: ")) for a, b in zip(lines[::2], lines[1::2], strict=True)
    ]


def test_a_model_that_knows_scores_one():
    result = evaluate_many_shot(
        Reader(lambda prompt: GOLD.get(asked(prompt))), DATA, Settings(shots=(1, 6), order_seeds=2)
    )
    assert {(row["score"], row["tied"]) for row in result.rows} == {(1.0, 1)}
    assert result.about["chance"] == pytest.approx(1 / 3)
    assert len(result.rows) == 12 * (1 + 2 * 2)
    row = result.rows[0]
    assert row["expected"] == row["got"] == GOLD[row["prompt"].removeprefix("Question: ").removesuffix("\nType:")]


def test_ties_are_shared():
    sides = (tuple(Labelled(e.text, e.label[:4]) for e in side) for side in (TRAIN, TEST))
    short = LabelledSet("short", *sides, "Question", "Type")
    result = evaluate_many_shot(Reader(lambda prompt: None), short, Settings(shots=(2,), order_seeds=1))
    assert {(row["tied"], row["got"]) for row in result.rows} == {(3, "city")}  # the first of them, sorted
    assert mean(result) == pytest.approx(1 / 3)


def test_labels_of_other_lengths_are_not_preferred_for_being_short():
    sides = (Labelled("a", "sea"), Labelled("b", "sea side")), (Labelled("c", "sea side"),)
    both = LabelledSet("prefix", *sides, "Question", "Type")
    result = evaluate_many_shot(Reader(lambda prompt: "sea side"), both, Settings(shots=(1,), order_seeds=1))
    assert mean(result, shots=1) == 1.0  # "sea" is the beginning of it, but a line end does not follow


def test_a_model_that_repeats_the_last_label_depends_on_the_order():
    lm = Reader(lambda prompt: (shown(prompt) or [("", None)])[-1][1])
    result = evaluate_many_shot(lm, DATA, Settings(shots=(6,), order_seeds=8))
    shares = {label: float(np.mean([gold == label for gold in GOLD.values()])) for label in LABELS}
    by_seed = [mean(result, order="random", order_seed=i) for i in range(8)]
    assert set(by_seed) <= set(shares.values())
    assert len(set(by_seed)) > 1
    rows = Rows(rows_of("many_shot", result.rows, {}, "m"))
    assert QUANTITIES["order_random"].values(rows, "m") == {0: pytest.approx(max(by_seed) - min(by_seed))}
    assert QUANTITIES["many_shot"].values(rows, "m") == {0: pytest.approx(np.mean(by_seed))}


def test_what_is_shown():
    prompts = []
    lm = Reader(lambda prompt: prompts.append(prompt))
    data = LabelledSet("places", (*TRAIN, Labelled("TEST 3: what?", "city")), TEST, "Question", "Type")
    evaluate_many_shot(lm, data, Settings(shots=(2, 30), samples=3, order_seeds=2))
    whole = [shown(prompt) for prompt in prompts if asked(prompt).startswith("test")]
    sizes = {len(examples) for examples in whole}
    assert sizes == {2, 30}
    texts = {text for examples in whole for text, _ in examples}
    assert texts == {example.text for example in TRAIN}  # the test text in other letters is not shown
    first, *orders = dict.fromkeys(map(tuple, whole))
    assert len(orders) == 4  # two seeds of each kind
    assert len({frozenset(order) for order in orders}) == 1  # of the same examples
    assert set(first) <= set(orders[0])
    alternated = [order for order in orders if all(len({b for _, b in order[i : i + 3]}) == 3 for i in range(0, 30, 3))]
    assert len(alternated) >= 2


def test_alternate_by_hand():
    examples = [Labelled(str(i), label) for i, label in enumerate("aabab" + "a")]
    order = "".join(f"{e.label}{e.text} " for e in alternate(examples, np.random.default_rng(0)))
    assert order in ("a0 b2 a1 b4 a3 a5 ", "b2 a0 b4 a1 a3 a5 ")


def test_the_seed_decides():
    def prompts(seed):
        seen = []
        evaluate_many_shot(
            Reader(lambda prompt: seen.append(prompt)), DATA, Settings(shots=(4,), samples=2, order_seeds=1, seed=seed)
        )
        return seen

    assert prompts(0) == prompts(0)
    assert prompts(0) != prompts(1)


@pytest.mark.parametrize("family", ["diff", "llama", "qwen3", "diffllama", "gpt2"])
def test_rows_keep_the_label_scores_and_the_text_of_the_examples(family):
    """The result alone is enough to rebuild a prompt and to score every label."""
    lm = tiny_lm(family, vocab_size=258, positions=400, initializer_range=0.3)
    result = evaluate_many_shot(lm, DATA, Settings(shots=(3,), samples=4, order_seeds=2))
    labels = result.about["labels"]
    texts = {}
    for row in result.rows:
        texts.setdefault((row["order"], row["order_seed"]), row.get("examples"))
        assert row["got"] == labels[int(np.argmax(row["logprobs"]))]
        prompt = (texts[row["order"], row["order_seed"]] + row["prompt"]).encode()
        for label, logprob in zip(labels, row["logprobs"], strict=True):
            losses = lm.token_losses(torch.tensor([[*prompt, *f" {label}\n".encode()]]))[0]
            assert logprob == pytest.approx(-losses[len(prompt) - 1 :].sum().item(), abs=1e-3)
    assert len(texts) == 4
    assert sum("examples" in row for row in result.rows) == 4


def test_the_examples_are_read_once_an_order():
    lm = Reader(lambda prompt: "city")
    evaluate_many_shot(lm, DATA, Settings(shots=(20,), order_seeds=2))
    long = [tokens for rows, tokens in lm.read if tokens > 300]
    assert len(long) == 4
    assert sum(rows * tokens for rows, tokens in lm.read if tokens < 300) < 4 * 12 * (60 + 3 * 15)


def test_prompts_are_filled_and_never_too_long():
    for length in (90, 200, 399):
        result = evaluate_many_shot(
            Reader(lambda prompt: "city"), DATA, Settings(lengths=(length,), order_seeds=2, samples=4)
        )
        longest = max(row["tokens"] for row in result.rows)
        assert longest <= length
        assert longest + len("Question: train 10: say\nType: mountain\n") > length


def test_without_sizes_the_prompts_double_up_to_the_positions():
    lm = Reader(lambda prompt: "city")
    lm.positions = 600
    result = evaluate_many_shot(lm, DATA, Settings(samples=2, order_seeds=1))
    tokens = [mean(result, "tokens", shots=k) for k in result.about["counts"]]
    assert result.about["counts"][0] == 1
    assert len(tokens) == 4
    assert all(low < t <= high for t, low, high in zip(tokens[1:], (200, 450, 540), (256, 512, 600), strict=True))
    quick = evaluate_many_shot(lm, DATA, Settings(samples=2, order_seeds=1, longest=300))
    assert 256 < max(row["tokens"] for row in quick.rows) <= 300


def test_errors():
    lm = Reader(lambda prompt: "city")
    with pytest.raises(ValueError, match="31 examples were asked for, and places has 30 to show"):
        evaluate_many_shot(lm, DATA, Settings(shots=(31,)))
    with pytest.raises(ValueError, match="has 5000 tokens, more than the 4096 positions of reader"):
        evaluate_many_shot(lm, DATA, Settings(lengths=(5000,)))
    with pytest.raises(ValueError, match="a prompt of 60 tokens has no room for an example"):
        evaluate_many_shot(lm, DATA, Settings(lengths=(60,)))
    lm.positions = 500
    with pytest.raises(ValueError, match=r"the longest prompt has .* more than the 500 positions of reader"):
        evaluate_many_shot(lm, DATA, Settings(shots=(30,)))
    same = LabelledSet("same", (Labelled("a", "x"), Labelled("B", "y")), (Labelled("A", "x"), Labelled("b", "y")))
    with pytest.raises(ValueError, match="every training text of same is a test text too"):
        evaluate_many_shot(lm, same, Settings(shots=(1,)))
