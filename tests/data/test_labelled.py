"""Labelled sets in the formats of the public files, written here."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from diff_transformer.data.tasks.labelled import SETS, load_labelled, read_csv
from diff_transformer.data.tasks.trec import COARSE, FINE
from diff_transformer.data.tasks.types import Labelled, LabelledSet, hold_out
from diff_transformer.errors import UserError

TRAIN = "HUM:ind Who painted the caf\xe9 at night ?\nLOC:city What is the capital of Norway ?\nNUM:date When was it ?\n"
TEST = "LOC:other Where is the  Lofoten wall ?\n\nHUM:gr Who won ?\n"


@pytest.fixture
def trec(tmp_path):
    (tmp_path / "train_5500.label").write_bytes(TRAIN.encode("latin-1"))
    (tmp_path / "TREC_10.label").write_bytes(TEST.encode("latin-1"))
    return tmp_path


def test_trec_with_coarse_classes(trec):
    data = load_labelled(trec)
    assert data.train[0] == Labelled("Who painted the caf\xe9 at night ?", "human")
    assert data.test == (Labelled("Where is the Lofoten wall ?", "location"), Labelled("Who won ?", "human"))
    assert data.labels == ("human", "location", "number")
    assert (data.text_name, data.label_name) == ("Question", "Type")


def test_trec_with_fine_classes(trec):
    (trec / "TREC_10.label").write_text("LOC:city Where ?\n")
    data = load_labelled(trec, fine=True)
    assert [example.label for example in data.train] == ["individual", "city", "date"]


def test_trec_has_6_and_50_classes_that_read_differently():
    assert len(COARSE) == len(set(COARSE.values())) == 6
    assert len(FINE) == len(set(FINE.values())) == 50
    assert {code.split(":")[0] for code in FINE} == set(COARSE)


@pytest.mark.parametrize(
    ("line", "message"), [("no class here", "'no' is not a coarse class"), ("LOC:city", "no question after the class")]
)
def test_lines_that_are_not_trec_are_named(trec, line, message):
    (trec / "train_5500.label").write_text(f"HUM:ind Who ?\n{line}\n")
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        load_labelled(trec)


def test_a_test_label_that_is_never_shown(trec):
    (trec / "TREC_10.label").write_text("ABBR:abb What is it short for ?\n")
    with pytest.raises(ValueError, match="the test labels abbreviation are not among the training labels"):
        load_labelled(trec)


def test_csv_with_quoted_line_breaks(tmp_path):
    quoted = 'text,category\n"My card,\nwhich ""never"" came",card_arrival\nHow old must I be?,age_limit\n'
    (tmp_path / "train.csv").write_text(quoted)
    (tmp_path / "test.csv").write_text("text,category\nWhere is it?,card_arrival\n")
    (tmp_path / "categories.json").write_text('["card_arrival", "age_limit"]')
    data = load_labelled(tmp_path)
    assert data.train[0] == Labelled('My card, which "never" came', "card arrival")
    assert data.test == (Labelled("Where is it?", "card arrival"),)
    assert (data.text_name, data.label_name) == ("Query", "Intent")


def test_csv_with_the_line_ends_of_old_macs_and_what_is_none(tmp_path):
    path = tmp_path / "mac.csv"
    path.write_bytes(b"text,label\rwhere is it,place\rhow old are you,age\rwhere am I,place\rhow old is it,age\r")
    assert {one.label for one in read_csv(path)} == {"place", "age"}
    path.write_text("text,label\n" + "a" * 200_000 + ",b\n")
    with pytest.raises(ValueError, match=r"mac.csv cannot be read as CSV \(field larger than"):
        read_csv(path)


def test_labels_that_would_read_the_same_are_refused(tmp_path):
    (tmp_path / "train.csv").write_text("text,category\na,card_arrival\nb,card arrival\nc,other\n")
    (tmp_path / "test.csv").write_text("text,category\nd,other\n")
    with pytest.raises(ValueError, match="'card_arrival' and 'card arrival' read the same"):
        load_labelled(tmp_path)


def test_csv_without_the_columns(tmp_path):
    (tmp_path / "train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has the columns a, b; it needs a text"):
        load_labelled(tmp_path / "train.csv")
    (tmp_path / "train.csv").write_text("text,label\nonly a text\n")
    with pytest.raises(ValueError, match="row 1 has no text or no label"):
        load_labelled(tmp_path / "train.csv")


def test_json_lines(tmp_path):
    for side in ("train", "test"):
        rows = [{"text": f"{side} {i}", "label": "ab"[i % 2]} for i in range(4)]
        (tmp_path / f"{side}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load_labelled(tmp_path)
    assert [example.text for example in data.test] == ["test 0", "test 1", "test 2", "test 3"]


def test_texts_that_are_out_of_scope_are_left_out(tmp_path):
    """Those of Clinic-150 (the hub's set), whose label is "oos"."""
    for side in ("train", "test"):
        rows = [("how do i say hi", "translate"), ("send 5 dollars", "transfer"), ("what is life", "oos")]
        (tmp_path / f"{side}.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    data = load_labelled(tmp_path)
    assert data.labels == ("transfer", "translate")
    assert len(data.test) == 2


def test_a_single_file_is_held_out_by_its_text(tmp_path):
    rows = [f"text number {i},{'odd' if i % 2 else 'even'}" for i in range(300)]
    (tmp_path / "all.csv").write_text("text,label\n" + "\n".join(rows))
    data = load_labelled(tmp_path / "all.csv")
    assert len(data.train) + len(data.test) == 300
    assert 30 < len(data.test) < 90
    (tmp_path / "all.csv").write_text("text,label\n" + "\n".join(rows[::-1]))
    assert set(load_labelled(tmp_path / "all.csv").test) == set(data.test)


def test_a_class_without_a_text_to_show_is_not_asked():
    common = [Labelled(f"text {i}", "common") for i in range(50)]
    rare = next(Labelled(f"rare {i}", "rare") for i in range(100) if hold_out([Labelled(f"rare {i}", "rare")])[0] == ())
    train, test = hold_out([*common, rare])
    assert rare not in train
    assert rare not in test


def test_python_s_own_documentation():
    data = load_labelled("python")
    assert len(data.labels) == 16
    assert len(data.test) > 100
    assert not {example.text for example in data.train} & {example.text for example in data.test}
    for example in data.train + data.test:
        assert 20 <= len(example.text) <= 100
        assert example.label.lower() not in example.text.lower()
    assert load_labelled("python") == data


class Rows(dict):
    """One side of a data set in the form of the datasets package."""

    def __init__(self, columns, names=None):
        super().__init__(columns)
        self.column_names = list(columns)
        self.features = {name: SimpleNamespace(names=names if name != "text" else None) for name in columns}


def use_hub(monkeypatch, load_dataset):
    fake = ModuleType("datasets")
    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)


def test_hub_sets_whose_script_is_no_longer_run(monkeypatch):
    asked = []

    def load_dataset(repository, config=None, revision=None):
        asked.append((repository, config, revision))
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found trec.py")
        side = Rows({"text": ["Who ?", "Where ?"], "coarse_label": [1, 0], "fine_label": [0, 1]}, ["LOC", "HUM"])
        side.features["fine_label"].names = ["HUM:ind", "LOC:city"]
        return {"train": side, "test": side}

    use_hub(monkeypatch, load_dataset)
    assert [example.label for example in load_labelled("hub:trec").train] == ["human", "location"]
    assert asked == [("CogComp/trec", None, None), ("CogComp/trec", None, "refs/convert/parquet")]
    assert [e.label for e in load_labelled("hub:trec", fine=True).test] == ["individual", "city"]
    assert load_labelled("hub:trec-fine") == load_labelled("hub:trec", fine=True)


def test_hub_sets_by_name(monkeypatch):
    asked = []

    def load_dataset(repository, config=None, revision=None):
        asked.append((repository, config))
        names = ["card_arrival", "age_limit", "oos"]
        column = "intent" if config == "plus" else "label"
        side = Rows({"text": ["Where?", "How old?", "Hm"], column: [0, 1, 2]}, names)
        return {"train": side, "validation": side}

    use_hub(monkeypatch, load_dataset)
    for name in ("banking77", "clinic150", "someone/something:plus"):
        data = load_labelled(f"hub:{name}")
        assert data.labels == ("age limit", "card arrival")
    assert asked == [(SETS["banking77"][0], None), (SETS["clinic150"][0], "plus"), ("someone/something", "plus")]


def test_hub_without_network_or_package(monkeypatch):
    def load_dataset(repository, config=None, revision=None):
        raise ConnectionError("Couldn't reach it\nmore")

    use_hub(monkeypatch, load_dataset)
    with pytest.raises(
        ValueError, match=r"cannot be downloaded from the hub \(Couldn't reach it\); connect .* data=python"
    ):
        load_labelled("hub:banking77")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        load_labelled("hub:banking77")
    with pytest.raises(ValueError, match="no labelled set hub:tree; there are: trec, trec-fine"):
        load_labelled("hub:tree")


def test_errors(tmp_path):
    with pytest.raises(UserError, match="no labelled set at /nowhere"):
        load_labelled("/nowhere")
    with pytest.raises(ValueError, match="holds nothing"):
        load_labelled(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"suffix '\.txt', which is not read"):
        load_labelled(tmp_path / "notes.txt")
    for source in ("python", "hub:banking77"):
        with pytest.raises(ValueError, match="only TREC has coarse and fine"):
            load_labelled(source, fine=True)
    with pytest.raises(ValueError, match="0 training and 0 test texts of 0 labels"):
        LabelledSet("none", (), ())
