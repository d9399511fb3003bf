from itertools import pairwise

import numpy as np
import pytest

from diff_transformer.data.kv_recall_task import RecallSource, RecallTask, make_recall_batch, recall_vocabulary
from diff_transformer.data.seeding import evaluation_rng


def _check_row(row, labels, vocabulary, pairs):
    """The queries' answers follow from the first part of the row alone, and nothing else carries a loss."""
    context, queries = row[: -2 * pairs], row[-2 * pairs :]
    keys, values, noise = (set(part.tolist()) for part in (vocabulary.keys, vocabulary.values, vocabulary.noise))
    facts = {int(a): int(b) for a, b in pairwise(context) if int(a) in keys}
    assert len(facts) == pairs
    assert set(facts.values()) <= values
    assert len(set(facts.values())) == pairs
    rest = [token for token in context.tolist() if token not in facts and token not in facts.values()]
    assert set(rest) <= noise
    assert len(rest) == len(context) - 2 * pairs
    assert sorted(queries[::2].tolist()) == sorted(facts)
    assert queries[1::2].tolist() == [facts[key] for key in queries[::2].tolist()]
    marked = np.flatnonzero(labels != -100)
    assert marked.tolist() == list(range(len(row) - 2 * pairs + 1, len(row), 2))
    np.testing.assert_array_equal(labels[marked], row[marked])


@pytest.mark.parametrize(("length", "pairs"), [(64, 4), (63, 5), (16, 4), (12, 1)])
def test_rows_are_solvable_and_only_their_answers_carry_a_loss(length, pairs):
    source = RecallSource(recall_vocabulary(range(100, 200)), RecallTask(length, pairs))
    ids, labels = source.rows(0, 50)
    assert ids.dtype == labels.dtype == np.int64
    for row, row_labels in zip(ids, labels, strict=True):
        _check_row(row, row_labels, source.vocabulary, pairs)
    if length > 4 * pairs:
        assert len({tuple(np.flatnonzero(np.isin(row, source.vocabulary.keys))) for row in ids}) > 5


def test_the_vocabulary_is_disjoint_and_always_the_same(tokenizer):
    vocabulary = recall_vocabulary(tokenizer)
    joined = np.concatenate([vocabulary.keys, vocabulary.values, vocabulary.noise])
    assert len(np.unique(joined)) == len(joined) == len(tokenizer) - 2
    assert not np.isin(tokenizer.all_special_ids, joined).any()
    np.testing.assert_array_equal(recall_vocabulary(tokenizer).keys, vocabulary.keys)
    assert len(recall_vocabulary(tokenizer, 20).values) == 20


def test_a_batch_to_score_names_positions_and_sources():
    vocabulary = recall_vocabulary(np.arange(80))
    task = RecallTask(length=48, pairs=6)
    ids, answers, sources = make_recall_batch(evaluation_rng(0), vocabulary, task, 30)
    assert ids.shape == (30, 48)
    assert answers.shape == sources.shape == (30, 6)
    asked = np.take_along_axis(ids, answers, axis=1)
    np.testing.assert_array_equal(asked, np.take_along_axis(ids, sources, axis=1))
    np.testing.assert_array_equal(
        np.take_along_axis(ids, answers - 1, axis=1), np.take_along_axis(ids, sources - 1, axis=1)
    )
    assert sources.max() < task.context
    for row, places in zip(ids, answers, strict=True):
        labels = np.full(48, -100)
        labels[places] = row[places]
        _check_row(row, labels, vocabulary, 6)
    again = make_recall_batch(evaluation_rng(0), vocabulary, task, 30)[0]
    np.testing.assert_array_equal(ids, again)


def test_questions_are_drawn_with_replacement_and_may_outnumber_the_pairs():
    vocabulary = recall_vocabulary(np.arange(80))
    ids, answers, sources = make_recall_batch(
        evaluation_rng(0), vocabulary, RecallTask(length=60, pairs=4, questions=10), 200
    )
    assert answers.shape == (200, 10)
    np.testing.assert_array_equal(np.take_along_axis(ids, answers, 1), np.take_along_axis(ids, sources, 1))
    counts = [len(set(row)) for row in sources.tolist()]
    assert max(counts) == 4
    assert min(counts) < 4  # a key may be left out
    assert np.isin(ids[:, :40], vocabulary.keys).sum() == 200 * 4


def test_distractors_are_keys_of_no_pair_and_take_their_share_of_the_noise():
    vocabulary = recall_vocabulary(np.arange(80))
    task = RecallTask(length=100, pairs=4, distractors=0.5)
    ids, _, sources = make_recall_batch(evaluation_rng(0), vocabulary, task, 200)
    keys = np.take_along_axis(ids, sources - 1, axis=1)
    context = ids[:, : task.context]
    lookalike = np.isin(context, vocabulary.keys)
    np.put_along_axis(lookalike, sources - 1, False, axis=1)
    assert lookalike.sum() / (200 * (task.context - 8)) == pytest.approx(0.5, abs=0.02)
    for row, own, marked in zip(context, keys, lookalike, strict=True):
        assert not set(row[marked]) & set(own)


def test_rows_are_a_pure_function_of_seed_and_index_across_blocks_of_drawing():
    make = lambda seed=7: RecallSource(recall_vocabulary(range(100)), RecallTask(40, 5), seed)  # noqa: E731
    ids, labels = make().rows(250, 300)
    for row in (0, 5, 6, 299):
        np.testing.assert_array_equal(make().rows(250 + row, 1)[0][0], ids[row])
        np.testing.assert_array_equal(make().rows(250 + row, 1)[1][0], labels[row])
    assert len({tuple(row) for row in ids.tolist()}) == 300
    assert make().rows(3, 0)[0].shape == (0, 40)
    assert not np.array_equal(make(8).rows(250, 300)[0], ids)


def test_errors():
    with pytest.raises(ValueError, match="at least 16, got 15"):
        RecallTask(length=15, pairs=4)
    with pytest.raises(ValueError, match=r"number of keys \(3\), one fewer with distractors; got 4"):
        RecallSource(recall_vocabulary(range(100), 3), RecallTask(pairs=4))
    with pytest.raises(ValueError, match="pairs is 0"):
        RecallTask(pairs=0)
    with pytest.raises(ValueError, match="leave no noise among 10 ids"):
        recall_vocabulary(range(10), 5)
    with pytest.raises(ValueError, match="noise_symbols is 9; give 1 to 8"):
        recall_vocabulary(range(12), 2, 9)
    with pytest.raises(ValueError, match="and a share from 0 to 1"):
        RecallTask(distractors=1.5)
