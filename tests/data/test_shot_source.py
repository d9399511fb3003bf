import numpy as np
import pytest

from diff_transformer.data import byte_tokenizer
from diff_transformer.data.shot_source import ShotSource
from diff_transformer.data.tasks.types import Labelled, LabelledSet

WORDS = {
    "animal": "cat dog horse sheep lion mouse",
    "place": "Oslo Rome Bern Lima Paris Turin",
    "food": "bread soup egg",
}
TEXTS = [Labelled(f"{word} {i}", label) for label, words in WORDS.items() for word in words.split() for i in range(8)]
TEST = [Labelled("cat 0", "animal"), Labelled("wolf", "animal")]  # the first is a training text too


def source(**options):
    made = LabelledSet("things", tuple(TEXTS), tuple(TEST), "Thing", "Kind")
    return ShotSource(made, byte_tokenizer(), **{"length": 200, "classes": (2, 3), "answer_loss_only": True, **options})


def shown(row):
    """(text, name) of each example of a row."""
    text = byte_tokenizer().decode(row[row != byte_tokenizer().pad_token_id])
    assert text.endswith("\n")
    return [
        tuple(part.split("\nKind: ")) for part in text.removesuffix("\n").removeprefix("Thing: ").split("\nThing: ")
    ]


def test_a_row_deals_a_name_to_each_of_its_classes():
    kinds, dealt = {word: label for label, words in WORDS.items() for word in words.split()}, set()
    ids, labels = source().rows(0, 40)
    for row, label in zip(ids, labels, strict=True):
        names = {}
        for text, name in shown(row):
            assert names.setdefault(kinds[text.split()[0]], name) == name
        assert len(set(names.values())) == len(names) <= 3
        dealt |= set(names.items())
        repeated = [name for i, (_, name) in enumerate(shown(row)) if name in [x for _, x in shown(row)[:i]]]
        assert byte_tokenizer().decode(label[label != -100]) == "".join(f" {name}" for name in repeated)
        assert (row != byte_tokenizer().pad_token_id).sum() > 170  # as many examples as fit
    assert len(dealt) == 9  # each class has had each name


def test_held_out_and_test_texts_are_never_trained_on():
    trained, held_out = (
        {text for row in source(held_out=side).rows(0, 300)[0] for text, _ in shown(row)} for side in (0, 1)
    )
    assert not trained & held_out
    assert trained | held_out == {example.text for example in TEXTS} - {"cat 0"}
    assert 0.1 < len(held_out) / len(TEXTS) < 0.3


def test_rows_are_functions_of_seed_and_index():
    whole = source(seed=1).rows(0, 6)
    for mine, part in zip(whole, source(seed=1).rows(4, 2), strict=True):
        np.testing.assert_array_equal(mine[4:], part)
    assert not np.array_equal(whole[0], source(seed=2).rows(0, 6)[0])
    ids, labels = source(answer_loss_only=False).rows(0, 6)
    np.testing.assert_array_equal(labels[labels != -100], ids[labels != -100])
    assert (labels == -100).sum() == (ids == byte_tokenizer().pad_token_id).sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": (4,)}, r"classes is \[4\]; .* 3 classes .* numbers from 1"),
        ({"classes": (0,)}, r"classes is \[0\]"),
        ({"length": 40}, "in rows of 40 tokens things has 0 classes"),
    ],
)
def test_what_does_not_fit_is_said(options, message):
    with pytest.raises(ValueError, match=message):
        source(**options)
