"""Quantised logits: rounding by hand, their scale against a slow formula, and models with known answers."""

import json

import pytest
import torch
from numbers_of import mean, measured
from tiny_models import tiny_lm

from diff_transformer.data.tasks.types import MultipleChoiceItem
from diff_transformer.evals.attention_call import AttentionCall
from diff_transformer.evals.quantization import (
    Settings,
    absmax,
    evaluate_quantization,
    quantise,
)
from diff_transformer.lab.evaluate import settings_of
from diff_transformer.model.matching import VARIANTS

KINDS = (*VARIANTS, "llama", "gpt2", "diffllama")
TASKS = [
    MultipleChoiceItem("The cat sat on", ("the mat.", "a very long sentence of another kind.", "blue.", "it"), 0),
    MultipleChoiceItem("One and one", ("are two.", "are three.", "are", "were a pair of shoes."), 1),
    MultipleChoiceItem("Where the river bends", ("it slows.", "stones!", "we rest", "no one goes."), 2),
]


def make(kind):
    return tiny_lm(kind, std=0.25, batch_size=8)


@pytest.fixture(params=KINDS)
def lm(request):
    return make(request.param)


def test_rounding_by_hand():
    values = torch.tensor([7.0, -7.0, 3.4, -3.6, 0.49, 0.51, 0.0])
    assert quantise(values, torch.tensor(7.0), 4).tolist() == [7, -7, 3, -4, 0, 1, 0]  # 7 steps of 1 on either side
    assert quantise(values[:3], torch.tensor(7.0), 2).tolist() == [7, -7, 0]  # -1, 0, 1 times 7
    assert quantise(torch.zeros(2), torch.tensor(0.0), 4).tolist() == [0, 0]
    for bits in (4, 6, 8, 16):
        found = quantise(values, torch.tensor(7.0), bits)
        assert (found - values).abs().max() <= 7 / (2 ** (bits - 1) - 1) / 2 + 1e-6
        assert len(quantise(torch.linspace(-1, 1, 200_000), torch.tensor(1.0), bits).unique()) == 2**bits - 1


def test_scales_by_a_loop(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q1, q2, k1, k2 = (torch.randn(2, 3, 9, 4, generator=generator) * size for size in (1, 5, 1, 5))
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    mask[0, :, :, :3] = False  # padding on the left
    call = AttentionCall(0, q1, k1, 0.5, mask, False, q2, k2, torch.tensor(0.3))
    monkeypatch.setattr(AttentionCall.blocks, "__defaults__", (100,))
    change = absmax(4)(call)
    blocks = [change(call.logits(rows), call.allowed(rows)) for rows in call.blocks()]
    found = [torch.cat(parts, dim=2) for parts in zip(*blocks, strict=True)]
    assert len(list(call.blocks())) > 3
    both = [0.5 * q1 @ k1.mT, 0.5 * q2 @ k2.mT]
    for which, logits in enumerate(both):
        for b in range(2):
            seen = mask[b, 0]
            largest = max(x[b, i][seen].abs().max() for x in both for i in range(3))
            for h in range(3):
                for t in range(3 if b == 0 else 0, 9):
                    expected = (logits[b, h, t] / (largest / 7)).round() * largest / 7
                    torch.testing.assert_close(found[which][b, h, t][seen[t]], expected[seen[t]])


def test_an_experiment_on_every_kind_of_model(lm):
    ids = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(5))
    before = lm.model(ids).logits
    result = evaluate_quantization(lm, TASKS, ids)
    loss = {bits: mean(result, "loss", bits=bits) for bits in (16, 8, 4)}
    plain = lm.token_losses(ids).mean().item()
    assert loss[16] == pytest.approx(plain, abs=2e-3)
    assert abs(loss[8] - loss[16]) < abs(loss[4] - loss[16])
    assert result.about["chance"] == 0.25
    assert len(result.rows) == 4 * (3 + 3)
    assert torch.equal(lm.model(ids).logits, before)


def test_log_probabilities_are_those_of_the_whole_sequence():
    lm = make("llama")
    result = evaluate_quantization(lm, TASKS, settings=Settings(bits=(16,)))
    for row, task in zip(result.rows, TASKS, strict=True):
        exact = []
        for choice in task.choices:
            whole = torch.tensor([list(f"{task.question} {choice}".encode())])
            losses = lm.token_losses(whole)[0]
            exact.append(-losses[len(task.question) - 1 :].sum().item())
        assert row["logprobs"] == pytest.approx(exact, abs=0.02)
        best = max(range(4), key=lambda i: exact[i] / len(task.choices[i]))
        assert row["got"] == task.choices[best]
        assert row["score"] == float(best == task.answer)
        assert row["plain"] == float(max(range(4), key=lambda i: exact[i]) == task.answer)


class Knows:
    """A replacement for likelihood scoring that computes each ending's log-probability from its text."""

    def __init__(self, monkeypatch, value):
        self.value = value
        monkeypatch.setattr("diff_transformer.evals.quantization.continuation_logprobs", self)

    def __call__(self, lm, contexts, endings, **_):
        return [[self.value(bytes(tokens).decode()) for tokens in choices] for choices in endings]


def test_a_model_that_knows_scores_one_and_one_that_does_not_zero(monkeypatch):
    lm, right = make("gpt2"), {" the mat.", " are three.", " we rest"}
    Knows(monkeypatch, lambda ending: -1.0 if ending in right else -100.0)
    rows = evaluate_quantization(lm, TASKS, settings=Settings(bits=(8, 4))).rows
    assert {(row["bits"], row["score"], row["plain"]) for row in rows} == {(8, 1.0, 1.0), (4, 1.0, 1.0)}
    Knows(monkeypatch, lambda ending: -100.0 if ending in right else -1.0)
    rows = evaluate_quantization(lm, TASKS, settings=Settings(bits=(8,))).rows
    assert {(row["score"], row["plain"]) for row in rows} == {(0.0, 0.0)}


def test_normalised_and_plain_scores_are_told_apart(monkeypatch):
    Knows(monkeypatch, lambda ending: -4.0 - 0.01 * len(ending))  # the shortest is likeliest, the longest a character
    result = evaluate_quantization(make("gpt2"), TASKS, settings=Settings(bits=(8,)))
    tasks = [max if normalised else min for normalised in (True, False)]
    expected = [
        sum(task.answer == pick(range(4), key=lambda i, t=task: len(t.choices[i])) for task in TASKS) / 3
        for pick in tasks
    ]
    assert [mean(result, name, experiment="quantization_choice") for name in ("score", "plain")] == pytest.approx(
        expected
    )


def test_a_context_too_long_loses_its_beginning_and_says_so():
    lm = make("gpt2")
    task = MultipleChoiceItem("x" * 50 + "y" * 100, ("yes.", "no."), 0)
    empty = MultipleChoiceItem("One", ("", "two"), 1)
    result = evaluate_quantization(lm, [task, TASKS[0], empty], settings=Settings(bits=(8,)))
    assert [row["cut"] for row in result.rows] == [26, 0, 0]  # 124 + 5 - 1 = 128 tokens are left
    with pytest.raises(ValueError, match="more than the 128 positions"):
        evaluate_quantization(lm, [MultipleChoiceItem("xy", ("z" * 129,), 0)])


def test_the_command(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A line of plain words about the weather in the hills.\n" * 200)
    rows = [{"ctx": f"Number {i} is", "endings": ["one.", "two."], "label": i % 2} for i in range(5)]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"data": str(tmp_path / "set.jsonl"), "corpus": str(text), "length": 50, "samples": 2}
    settings = settings_of("quantization", options, ["rows=2", "bits=[8, 4]"])
    result = measured("quantization", make("diff"), settings, tmp_path / "out.jsonl.gz")
    assert len(result.rows) == 2 * (2 + 2)
