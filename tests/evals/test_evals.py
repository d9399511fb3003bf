"""The experiments on fakes whose answers are known, and on a tiny model computed by another route."""

import numpy as np
import pytest
import torch

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.data.corpus import Document
from diff_transformer.data.filler import Filler
from diff_transformer.data.tokenizer import byte_tokenizer, encode, token_spans
from diff_transformer.evals.allocation import evaluate_allocation
from diff_transformer.evals.associative_recall import evaluate_associative_recall
from diff_transformer.evals.lm import CausalLM, tapped_attention
from diff_transformer.evals.needle import check_needle_fits, evaluate_needle
from diff_transformer.evals.outliers import Magnitudes, evaluate_outliers
from diff_transformer.evals.types import Result
from diff_transformer.model.presets import preset

SIZES = {"settings": ((1, 1), (3, 2)), "depths": (0.0, 1.0), "length": 400, "samples": 3}


@pytest.fixture(scope="module")
def filler():
    return Filler([Document("prose", "It was a quiet street, and nobody had come by since the morning. " * 60)])


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    config = preset("debug", vocab_size=258, max_position_embeddings=512, num_key_value_heads=2)
    return CausalLM(DiffTransformerForCausalLM(config), byte_tokenizer(), "tiny", batch_size=4)


class Finder:
    """A model that has read the prompt and says what ``answer`` makes of it."""

    name, tokenizer = "finder", byte_tokenizer()

    def __init__(self, answer):
        self.answer = answer

    def generate(self, prompts, max_new_tokens):
        return [self.answer(prompt) for prompt in prompts]


def read_out(prompt):
    context, question = prompt.rsplit("\nQuestion: What ", 1)
    asked = question.split(" of ", 1)[1].split("?")[0].replace(" and ", ", ").split(", ")
    facts = dict(s.split(" is ") for s in context.replace(".", ". ").split("The magic number of ")[1:])
    numbers = [facts[city].split(".")[0] for city in asked]
    return (
        f" {numbers[0]}" + "".join(f", {c} is {n}" for c, n in zip(asked[1:], numbers[1:], strict=True)) + ".\nOther 77"
    )


def test_a_model_that_finds_everything_scores_one(filler):
    result = evaluate_needle(Finder(read_out), filler, **SIZES)
    assert result.metrics["n1_r1"] == result.metrics["n3_r2"] == 1.0
    assert result.metrics["n3_r2_depth0"] == result.metrics["n3_r2_depth100"] == 1.0
    assert len(result.rows) == 12


def test_a_model_that_finds_nothing_scores_zero(filler):
    result = evaluate_needle(Finder(lambda prompt: " I cannot say."), filler, **SIZES)
    assert result.metrics["n1_r1"] == result.metrics["n3_r2"] == result.metrics["partial_n3_r2"] == 0.0


def test_half_an_answer_is_half_a_point(filler):
    result = evaluate_needle(Finder(lambda prompt: read_out(prompt).split(",")[0]), filler, **SIZES)
    assert result.metrics["n1_r1"] == 1.0
    assert result.metrics["n3_r2"] == 0.5
    assert result.metrics["partial_n3_r2"] == 1.0


def test_prompts_are_those_of_the_seed(filler):
    prompts = [[], [], []]
    for seen, seed in zip(prompts, (0, 0, 1), strict=True):
        evaluate_needle(Finder(lambda prompt, seen=seen: seen.append(prompt) or ""), filler, **SIZES, seed=seed)
    assert prompts[0] == prompts[1]
    assert not set(prompts[0]) & set(prompts[2])


def test_cells_that_do_not_fit_are_named(filler):
    with pytest.raises(ValueError, match="needle evaluation with N=8, R=2, 200 tokens: length"):
        check_needle_fits(filler, byte_tokenizer(), ((1, 1), (8, 2)), 200, 2)


def test_allocation_counts_the_right_tokens(filler):
    class Fake:
        name, tokenizer = "fake", byte_tokenizer()

        def last_row_attention(self, ids):
            text = self.tokenizer.decode(ids[0])
            start = text.index("The magic number")
            stop = text.index(".", start) + 1
            question = text.rindex("\nQuestion")
            spans = token_spans(self.tokenizer, text, [(start, stop), (question, len(text))])
            row = torch.zeros(len(ids[0]))
            row[0] = 0.5  # the first token counts for neither
            row[slice(*spans[0])] = 0.2 / (spans[0][1] - spans[0][0])
            row[spans[0][0] - 2] = -0.1  # noise, negative
            row[slice(*spans[1])] = 0.2 / (spans[1][1] - spans[1][0])
            return [row[None], row[None]]

    result = evaluate_allocation(Fake(), filler, length=300, samples=2, depths=(0.25, 0.75))
    assert result.metrics["answer_depth25"] == pytest.approx(0.2, abs=1e-6)
    assert result.metrics["noise_depth75"] == pytest.approx(0.1, abs=1e-6)


def test_last_row_is_the_last_row_of_the_map(lm):
    ids = torch.randint(0, 256, (1, 30))
    expected = lm.model(ids, output_attentions=True).attentions
    for row, whole in zip(lm.last_row_attention(ids), expected, strict=True):
        torch.testing.assert_close(row, whole[0, :, -1], atol=1e-6, rtol=1e-5)


def test_loss_slices_against_a_loop():
    ids = torch.tensor([[1, 2, 3, 1, 2, 4], [5, 6, 5, 6, 5, 6]])
    losses = torch.arange(10, dtype=torch.float32).view(2, 5)

    class Fake:
        name, tokenizer = "fake", None

        def token_losses(self, rows):
            return losses

    training = np.array([6, 5, 0] * 20 + [1, 2, 3, 7, 8, 9] * 10)  # the pair (6, 5) is known by heart
    result = evaluate_associative_recall(Fake(), ids, training, vocab_size=10, frequent_share=0.15)
    hits = [losses[0, 3].item(), losses[1, 2].item(), losses[1, 4].item()]  # (1, 2) again; (5, 6) twice again
    assert result.metrics["ar_hit"] == pytest.approx(np.mean(hits))
    assert result.metrics["ar_hit_share"] == pytest.approx(0.3)
    assert result.metrics["others"] == pytest.approx((45 - sum(hits)) / 7)
    assert result.metrics["validation"] == pytest.approx(4.5)
    counted = sum(row["ar_hit_count"] + row["others_count"] for row in result.rows)
    assert counted == 10


def test_token_losses_are_the_model_s_loss(lm):
    ids = torch.randint(0, 256, (6, 20))
    losses = lm.token_losses(ids)
    assert losses.shape == (6, 19)
    assert losses.mean().item() == pytest.approx(lm.model(ids, labels=ids).loss.item(), abs=1e-5)


def test_generation_in_batches_is_generation_alone(lm):
    prompts = ["one", "a longer prompt", "x", "something in between", "the fifth"]
    assert lm.generate(prompts, 6) == [lm.generate([prompt], 6)[0] for prompt in prompts]


def test_outliers_against_the_whole_tensor(lm):
    ids = torch.randint(0, 256, (6, 40), generator=torch.Generator().manual_seed(3))
    before = lm.model(ids).logits
    logits, hidden = [], []
    hooks = lambda: [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in lm.model.modules()]  # noqa: E731

    def look(layer, core, q, k, mask, is_causal):
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / q.shape[-1] ** 0.5
        logits.append(scores[..., torch.ones(40, 40).tril().bool()].abs().flatten())

    with tapped_attention(lm.model, look):
        hidden = [h.abs().flatten() for h in lm.model.model(ids, output_hidden_states=True).hidden_states[1:-1]]
    installed = hooks()
    result = evaluate_outliers(lm, ids, block=16)
    exact = torch.cat(logits).sort(descending=True).values
    for rank in (1, 2, 3, 10, 100):
        assert result.metrics[f"logits_top{rank}"] == pytest.approx(exact[rank - 1].item(), rel=1e-4)
    assert result.metrics["logits_median"] == pytest.approx(exact.median().item(), rel=0.01)
    assert result.metrics["hidden_top1"] >= torch.cat(hidden).max().item() - 1e-5
    assert max(row["logits_top1"] for row in result.rows) == pytest.approx(result.metrics["logits_top1"])
    assert torch.equal(lm.model(ids).logits, before)
    assert hooks() == installed


def test_magnitudes_stream():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 100
    stream = Magnitudes()
    for part in values.split(777):
        stream.add(part)
    ranked = values.abs().sort(descending=True).values
    assert torch.equal(stream.top, ranked[:100])
    assert stream.median() == pytest.approx(values.abs().median().item(), rel=0.01)


def test_results_survive_json(tmp_path):
    result = Result("needle", "m", {"n1_r1": 0.5}, [{"score": 1.0}], {"seed": 0})
    result.save(tmp_path / "deep" / "r.json")
    assert Result.load(tmp_path / "deep" / "r.json") == result


def test_foreign_models_are_refused_clearly():
    with (
        pytest.raises(ValueError, match="Linear has no attention of this package"),
        tapped_attention(torch.nn.Linear(2, 2), lambda *args: None),
    ):
        pass


def test_encode_is_what_prompts_use(filler):
    assert encode(byte_tokenizer(), "ab").tolist() == [97, 98]
