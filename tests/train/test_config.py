import pytest

from diff_transformer.checks import differences
from diff_transformer.recipes import RECIPES, recipe
from diff_transformer.train.config import RunConfig, override


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
        ("optimm.lr=1", "no setting 'optimm.lr'; the nearest: optim.lr"),
        ("model.atention=softmax", "no setting 'model.atention'; the nearest: model.attention"),
        ("optim.lr", "'optim.lr' is not an assignment; write key=value"),
        ("train.steps=many", "train.steps=many: int is needed"),
        ("train.steps=1.5", "train.steps=1.5: int is needed"),
        ("train.compile=1", "train.compile=1: bool is needed"),
    ],
)
def test_bad_overrides_are_refused(assignment, message):
    with pytest.raises(ValueError, match=message):
        override(recipe("debug"), [assignment])


@pytest.mark.parametrize(
    "assignment",
    ["train.steps=0", "train.batch_size=-1", "data.length=0", "optim.lr=0", "evaluation.samples=0", "train.threads=-1",
     "optim.weight_decay=-0.1", "data.recall.pairs=0"],
)  # fmt: skip
def test_sizes_must_be_positive(assignment):
    config = override(recipe("debug"), [assignment])
    with pytest.raises(ValueError, match=assignment.split("=")[0].replace(".", r"\.") + " is .*"):
        config.validate()


def test_batch_divides_into_pieces():
    with pytest.raises(ValueError, match=r"batch_size 8 is not divisible by train\.accumulate 3"):
        override(recipe("debug"), ["train.accumulate=3"]).validate()


def test_differences_name_the_path():
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2}) == ["a.b: 1 against 3"]


def test_a_precision_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"train\.precision is 'fp8'; accepted: 32-true"):
        override(recipe("debug"), ["train.precision=fp8"]).validate()
