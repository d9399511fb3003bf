import json
import re

import numpy as np
import pytest

from diff_transformer.checks import differences
from diff_transformer.lab.recipes import RECIPES, recipe
from diff_transformer.train.config import RunConfig, TrainConfig, override
from diff_transformer.train.loop import train


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_valid_and_survive_json(name, tmp_path):
    config = recipe(name).validate()
    config.save(tmp_path / "config.json")
    assert RunConfig.load(tmp_path / "config.json") == config


def test_overrides_reach_every_kind_of_value():
    assignments = [
        "optim.lr=3e-4", "train.steps=7", "data.mixture.text=0.25", "model.attention=softmax", "train.compile=true",
        "optim.betas=[0.9, 0.99]", "model.head_norm=no_weight", "model.head_norm_init=1", "data.needles.counts=[1,3]",
        "evaluation.needles=[[1,1],[3,2]]",
    ]  # fmt: skip
    config = override(recipe("debug"), assignments)
    assert (config.optim.lr, config.train.steps, config.data.mixture["text"]) == (3e-4, 7, 0.25)
    assert (config.model["attention"], config.model["head_norm"], config.train.compile) == (
        "softmax",
        "no_weight",
        True,
    )
    assert (config.optim.betas, config.data.needles.counts) == ((0.9, 0.99), (1, 3))
    assert config.evaluation.needles == ((1, 1), (3, 2))
    assert recipe("debug").optim.lr == 3e-3


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optim.lrr=1", "no setting 'optim.lrr'; the nearest: optim.lr"),
        ("data.seed=3", "no setting 'data.seed'; the nearest: train.seed"),
        ("optimm.lr=1", "no setting 'optimm.lr'; the nearest: optim.lr"),
        ("model.atention=softmax", "no setting 'model.atention'; the nearest: model.attention"),
        ("optim.lr", "'optim.lr' is not an assignment; write key=value"),
        ("train.steps=many", "train.steps is 'many'; give a whole number"),
        ("train.steps=1.5", "train.steps is 1.5; give a whole number"),
        ("train.compile=1", "train.compile is 1; give true or false"),
        ("model.hidden_size=abc", "model.hidden_size is 'abc'; give a whole number"),
        ("model.head_dim=abc", "model.head_dim is 'abc'; give a whole number or null"),
        ("optim.betas=[0.9]", "optim.betas is [0.9]; give a list of 2 numbers, such as [0.5, 0.5]"),
        ("optim.lr=1e400", "optim.lr is inf; give a finite number"),
        ("optim=fast", "optim is 'fast'; give an object"),
        ("data=fast", "data is 'fast'; give an object"),
        ('data.needles.counts=["a"]', "data.needles.counts is ['a']; give a list of whole numbers, such as [1]"),
        (
            "evaluation.needles=[1,2]",
            "evaluation.needles is [1, 2]; give a list of lists of 2 whole numbers, such as [[1, 1]]",
        ),
        ('data.corpora={"a":"b"}', "data.corpora is {'a': 'b'}; give an object with numbers, such as {\"name\": 0.5}"),
        ("data.mixture.text=much", "data.mixture is {'text': 'much'"),
        ("evaluation.more.long_nll=3", "give an object with objects"),
        ("train.initial_model=3", "train.initial_model is 3; give a text or null"),
    ],
)
def test_bad_overrides_are_refused(assignment, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        override(recipe("debug"), [assignment])


def test_values_become_what_their_fields_declare():
    config = override(recipe("debug"), ["train.steps=7.0", "optim.weight_decay=1", "model.head_norm_init=1"])
    found = config.train.steps, config.optim.weight_decay, config.model["head_norm_init"]
    assert [(value, type(value)) for value in found] == [(7, int), (1.0, float), (1.0, float)]
    assert override(recipe("debug"), ["model.head_norm_init=[1, 0.5]"]).model["head_norm_init"] == [1.0, 0.5]
    assert override(recipe("debug"), ["data.max_bytes=null", "train.initial_model=m"]).data.max_bytes is None


@pytest.mark.parametrize(
    "assignment",
    ["train.steps=0", "train.batch_size=-1", "data.length=0", "optim.lr=0", "evaluation.samples=0", "train.threads=-1",
     "optim.weight_decay=-0.1", "data.recall.pairs=0", "optim.eps=-1", "optim.betas=[1.5,2]", "train.seed=-1",
     "evaluation.seed=-1", "train.seed=4294967296", "data.mixture={}", 'data.mixture={"text": -1, "recall": 1}',
     'data.mixture={"text": 0}', 'data.corpora={"a": 0}', "data.max_bytes=0", "data.needles.counts=[]",
     "data.needles.queries=[0]", "evaluation.needles=[[2,3]]"],
)  # fmt: skip
def test_values_out_of_range_are_refused(assignment):
    config = override(recipe("debug"), [assignment])
    with pytest.raises(ValueError, match=assignment.split("=")[0].replace(".", r"\.") + " is .*"):
        config.validate()


def test_what_is_wrong_with_the_model_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
    def loading(config):
        raise AssertionError("the corpus is read")

    monkeypatch.setattr("diff_transformer.train.loop.load_training_data", loading)
    for fields, message in (
        ({"hidden_size": "abc"}, "model.hidden_size is 'abc'; give a whole number"),
        ({"hidden_size": 65}, "hidden_size 65 is not divisible"),
        ({"max_position_embeddings": 8}, "data.length is 96, more than model.max_position_embeddings 8"),
    ):
        config = recipe("debug")
        config.model |= fields
        with pytest.raises(ValueError, match=re.escape(message)):
            train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_batch_divides_into_pieces():
    with pytest.raises(ValueError, match=r"batch_size 8 is not divisible by train\.accumulate 3"):
        override(recipe("debug"), ["train.accumulate=3"]).validate()


def test_passes_are_said_once():
    override(recipe("debug"), ["train.micro_batch_size=3"]).validate()
    with pytest.raises(ValueError, match=r"micro_batch_size is 2 and train\.accumulate 4, which both .*; set train"):
        override(recipe("debug"), ["train.micro_batch_size=2", "train.accumulate=4"]).validate()
    with pytest.raises(ValueError, match=r"train\.micro_batch_size is -1; it must not be negative"):
        override(recipe("debug"), ["train.micro_batch_size=-1"]).validate()


def test_the_old_name_of_a_setting_is_an_alias():
    old = recipe("debug").to_dict()
    old["train"]["micro_rows"] = 3
    del old["train"]["micro_batch_size"]
    for make in (
        lambda: override(recipe("debug"), ["train.micro_rows=3"]).train,
        lambda: RunConfig.from_dict(old).train,
        lambda: TrainConfig(micro_rows=3),
    ):
        with pytest.warns(DeprecationWarning, match=r"train\.micro_rows is now train\.micro_batch_size"):
            assert make().micro_batch_size == 3
    assert "micro_rows" not in recipe("debug").to_dict()["train"]


def test_differences_name_the_path():
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2}) == ["a.b: 1 against 3"]


def test_a_precision_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"train\.precision is 'fp8'; accepted: 32-true"):
        override(recipe("debug"), ["train.precision=fp8"]).validate()


@pytest.mark.parametrize(
    ("precision", "why"), [("16-mixed", "no checkpoint holds the scale"), ("16-true", "round"), ("bf16-true", "round")]
)
def test_precisions_that_cannot_train_are_refused(precision, why):
    message = rf"train\.precision is '{precision}', which does not train: .*{why}.*; give 'bf16-mixed' or '32-true'"
    with pytest.raises(ValueError, match=message):
        override(recipe("debug"), [f"train.precision={precision}"]).validate()


def test_a_value_of_another_kind_set_in_python_is_refused_in_words():
    for place, name, value in (("data", "length", "two"), ("train", "steps", 10.5), ("train", "steps", True)):
        config = recipe("debug")
        setattr(getattr(config, place), name, value)
        with pytest.raises(ValueError, match=rf"^{place}\.{name} is {value!r}; give a whole number$"):
            config.validate()
    config.train.steps, config.optim.lr = np.int64(12), np.float32(0.5)
    config.validate()
    assert json.loads(json.dumps([config.train.steps, config.optim.lr])) == [12, 0.5]


def test_a_run_saved_with_the_seed_that_had_no_effect_still_loads():
    old = recipe("debug").to_dict()
    old["data"]["seed"] = 7
    assert RunConfig.from_dict(old) == recipe("debug")
