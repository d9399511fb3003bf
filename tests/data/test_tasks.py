"""Question sets from files, the hub and Python's own documentation."""

import json

import datasets
import pytest

from diff_transformer.data.tasks.continuations import load_continuations
from diff_transformer.data.tasks.grounded import load_grounded
from diff_transformer.data.tasks.labelled import hold_out, load_labelled
from diff_transformer.data.tasks.rows import rows_of, stem_of
from diff_transformer.data.tasks.types import GroundedItem, Labelled, LabelledSet
from diff_transformer.errors import UserError


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def hub(monkeypatch):
    """A hub whose sets are ``hub.sets``: rows by repository; ``hub.asked`` are the requests."""

    class Hub:
        sets, asked = {}, []

    def load(repository, config=None, *, split=None, revision=None):
        Hub.asked.append((repository, config, split, revision))
        rows = Hub.sets[repository]
        side = rows if isinstance(rows, datasets.Dataset) else datasets.Dataset.from_list(rows)
        return side if split else datasets.DatasetDict({"train": side.select([]), "validation": side})

    Hub.asked = []
    monkeypatch.setattr(datasets, "load_dataset", load)
    return Hub


def test_rows_of_files_in_every_format(tmp_path, monkeypatch):
    rows = [{"text": "one", "label": "a"}, {"text": "two, three", "label": "b"}]
    write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "c.csv").write_text('text,label\none,a\n"two, three",b\n')
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "d.parquet")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.jsonl", "b.json", "c.csv", "d.parquet"):
        assert rows_of(f"~/{name}") == rows
    assert stem_of(tmp_path / "my.set-Test.jsonl.gz") == "my.set-Test"
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(UserError, match="holds no rows"):
        rows_of(str(tmp_path / "empty.json"))
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(UserError, match=r"empty\.csv cannot be read \(EmptyDataError: No columns to parse"):
        rows_of(str(tmp_path / "empty.csv"))
    with pytest.raises(UserError, match=r"^no file at nowhere\.json; give"):
        rows_of("nowhere.json")


def test_a_set_of_the_hub_that_cannot_be_downloaded(monkeypatch):
    def load(*_, **__):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", load)
    for loading in (load_grounded, load_labelled, load_continuations):
        with pytest.raises(UserError, match=r"cannot be read \(ConnectionError: no network\); connect this"):
            loading("hub:acme/set")


def test_labelled_folders_of_csv(tmp_path):
    quoted = 'text,category\n"My card,\nwhich ""never"" came",card_arrival\nHow old must I be?,age_limit\nHm,oos\n'
    (tmp_path / "train.csv").write_text(quoted)
    (tmp_path / "test.csv").write_text("text,category\nWhere is it?,card_arrival\n")
    data = load_labelled(tmp_path)
    assert [example.text for example in data.train] == ['My card, which "never" came', "How old must I be?"]
    assert [example.label for example in data.train] == ["card arrival", "age limit"]
    assert data.test == (Labelled("Where is it?", "card arrival"),)


def test_a_single_file_is_held_out_by_its_text(tmp_path):
    rows = [{"text": f"text number {i}", "label": "odd" if i % 2 else "even"} for i in range(300)]
    data = load_labelled(write(tmp_path / "all.jsonl", *rows, {"text": "without a label"}))
    assert len(data.train) + len(data.test) == 300
    assert 30 < len(data.test) < 90
    assert set(load_labelled(write(tmp_path / "all.jsonl", *rows[::-1])).test) == set(data.test)
    common = [Labelled(f"text {i}", "common") for i in range(50)]
    rare = next(Labelled(f"rare {i}", "rare") for i in range(100) if hold_out([Labelled(f"rare {i}", "rare")])[0] == ())
    train, test = hold_out([*common, rare])
    assert rare not in (*train, *test)


@pytest.mark.slow
def test_labels_of_python_s_own_documentation():
    data = load_labelled("python")
    assert len(data.labels) == 16
    assert len(data.test) > 100
    assert not {example.text for example in data.train} & {example.text for example in data.test}
    assert all(20 <= len(example.text) <= 100 for example in data.train + data.test)
    assert not any(example.label.lower() in example.text.lower() for example in data.train + data.test)
    assert load_labelled("python") == data


def test_labelled_sets_of_the_hub(hub):
    classes = datasets.ClassLabel(names=["card_arrival", "age_limit"])
    features = datasets.Features({"query": datasets.Value("string"), "label": classes})
    columns = {"query": ["Where?", "How old?"], "label": [0, 1]}
    hub.sets["acme/cards"] = datasets.Dataset.from_dict(columns, features=features)
    assert load_labelled("hub:acme/cards?config=plus&revision=v1").labels == ("age limit", "card arrival")
    assert hub.asked == [("acme/cards", "plus", side, "v1") for side in ("train", "test")]


def test_labelled_sets_that_are_none(tmp_path):
    with pytest.raises(UserError, match="no file at /nowhere"):
        load_labelled("/nowhere")
    with pytest.raises(UserError, match="has the columns a; it needs a text"):
        load_labelled(write(tmp_path / "bad.jsonl", {"a": 1}))
    sides = (Labelled("a", "x"), Labelled("b", "y")), (Labelled("c", "z"),)
    for train, test in (sides, (sides[1], sides[1]), (sides[0], ())):
        with pytest.raises(UserError, match="of whose labels no training text has; give two labels or more"):
            LabelledSet("none", train, test)


HOTPOT = {
    "_id": "h1", "question": "Where?", "answer": "Rome", "type": "bridge", "level": "easy",
    "supporting_facts": [["A", 0]], "context": [["A", ["One.", " Two."]], ["B", ["Three."]]],
}  # fmt: skip
COLUMNS = {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]}


def only(path) -> GroundedItem:
    (items,) = load_grounded(str(path)).values()
    assert len(items) == 1
    return items[0]


def test_summaries(tmp_path):
    xsum = only(write(tmp_path / "xsum.jsonl", {"document": "A long story.", "summary": " Short. ", "id": "7"}))
    assert xsum == GroundedItem("summary", "A long story.", references=("Short.",))
    cnn = only(write(tmp_path / "cnn.jsonl", {"article": "Text.", "highlights": "One .\nTwo .", "id": "c"}))
    assert (cnn.document, cnn.references) == ("Text.", ("One .\nTwo .",))


def test_questions(tmp_path):
    (tmp_path / "hotpot.json").write_text(json.dumps([HOTPOT]))
    text = "A\nOne. Two.\n\nB\nThree."
    assert only(tmp_path / "hotpot.json") == GroundedItem("question", text, "Where?", ("Rome",))
    assert only(write(tmp_path / "hub.jsonl", {**HOTPOT, "context": COLUMNS})).document == text
    for answers in (["a", "b", "a"], {"text": ["a", "b", "a"], "answer_start": [0, 1, 0]}):  # the latter is SQuAD's
        simple = only(write(tmp_path / "simple.jsonl", {"document": "D", "question": "Q?", "answers": answers}))
        assert simple == GroundedItem("question", "D", "Q?", ("a", "b"))


def test_several_sources_samples_and_seeds(tmp_path):
    rows = [{"document": f"D{i}", "summary": f"S{i}"} for i in range(30)]
    path, other = write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", *rows[:3])
    sets = load_grounded(f"{path}, {other}", samples=5)
    assert {name: len(items) for name, items in sets.items()} == {"a": 5, "b": 3}
    (tmp_path / "more").mkdir()
    again = write(tmp_path / "more" / "a.jsonl", *rows[:2])
    assert [len(items) for items in load_grounded(f"{path},{again}").values()] == [30, 2]
    assert load_grounded(f"{path}", samples=5)["a"] == sets["a"]
    assert load_grounded(f"{path}", samples=5, seed=1)["a"] != sets["a"]
    assert set(load_grounded(f"{path}", samples=4)["a"]) < set(sets["a"])


@pytest.mark.parametrize(
    "row",
    [
        {"text": "x"},
        {"document": "d", "question": "q"},
        {"document": "d", "question": "q", "answers": [3]},
        {"document": "d", "question": "q", "answers": []},
        {"question": "q", "answer": "a", "context": [["A"]]},
        {"document": 3, "summary": "s"},
    ],
)
def test_grounded_rows_that_cannot_be_read_are_named(tmp_path, row):
    with pytest.raises(UserError, match=r"row 0 of .*bad\.jsonl cannot be read \(.*\); accepted rows are"):
        load_grounded(str(write(tmp_path / "bad.jsonl", row)))


def test_sets_of_the_hub(hub):
    hub.sets |= {
        "abisee/cnn_dailymail": [{"article": "D", "highlights": "S", "id": "1"}],
        "hotpotqa/hotpot_qa": [{**HOTPOT, "context": COLUMNS, "supporting_facts": None}],
    }
    sets = load_grounded("hub:abisee/cnn_dailymail?config=3.0.0, hub:hotpotqa/hotpot_qa?config=distractor")
    assert {name: items[0].kind for name, items in sets.items()} == {
        "cnn_dailymail": "summary",
        "hotpot_qa": "question",
    }
    assert hub.asked[0] == ("abisee/cnn_dailymail", "3.0.0", None, None)
    with pytest.raises(UserError, match="data is ','"):
        load_grounded(",")


def test_continuations_of_a_file_and_of_the_hub(tmp_path, hub):
    row = {"activity_label": "Skiing", "ctx": "A man stands. He", "endings": ["sits.", "flies.", "skis."], "label": "2"}
    (item,) = load_continuations(str(write(tmp_path / "val.jsonl", row)))
    assert (item.question, item.choices[item.answer]) == ("Skiing: A man stands. He", "skis.")
    for label in ("3", -1):
        with pytest.raises(UserError, match="is not in the format of HellaSwag"):
            load_continuations(str(write(tmp_path / "bad.jsonl", {**row, "label": label})))
    hub.sets["some/set"] = [{"ctx": f"context {i}", "endings": ["x", "y"], "label": "1"} for i in range(9)]
    items = load_continuations("hub:some/set", seed=1)
    assert hub.asked[-1][2] == "validation"
    assert len({item.question for item in items}) == 9
    assert items == load_continuations("hub:some/set", seed=1) != load_continuations("hub:some/set", seed=2)
