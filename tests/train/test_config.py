import re
from pathlib import Path

import pytest

from diff_transformer.lab.recipes import recipe
from diff_transformer.train.config import override
from diff_transformer.train.loop import train


def test_overrides_reach_every_kind_of_value():
    assignments = [
        "optim.lr=.0003", "train.steps=7", "data.mixture.text=0.25", "model.attention=softmax", "train.compile=true",
        "optim.betas=[0.9, 0.99]", "model.head_norm=no_weight", "model.head_norm_init=1", "data.needles.counts=[1,3]",
        "evaluation.needles=[[1,1],[3,2]]", "optim.weight_decay=1", "data.max_bytes=null", "train.initial_model=~/m",
        "evaluation.more.needle.samples=3",
    ]  # fmt: skip
    config = override(recipe("debug"), assignments)
    assert (config.optim.lr, config.train.steps, config.data.mixture["text"]) == (3e-4, 7, 0.25)
    assert (config.model["attention"], config.model["head_norm"]) == ("softmax", "no_weight")
    assert (config.optim.betas, config.data.needles.counts) == ((0.9, 0.99), (1, 3))
    assert (config.evaluation.needles, config.train.compile) == (((1, 1), (3, 2)), True)
    assert (config.optim.weight_decay, config.data.max_bytes) == (1.0, None)
    assert config.evaluation.more == {"long_nll": {"samples": 3}, "needle": {"samples": 3}}
    assert config.train.initial_model == str(Path("~/m").expanduser())
    assert recipe("debug").optim.lr == 3e-3


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optim.lrr=1", "no setting 'optim.lrr' (did you mean 'optim.lr'?)"),
        ("data.seed=3", "no setting 'data.seed' (did you mean 'train.seed'?)"),
        ("optimm.lr=1", "no setting 'optimm.lr' (did you mean 'optim.lr'?)"),
        ("model.atention=softmax", "no setting 'model.atention' (did you mean 'model.attention'?)"),
        ("optim.lr", "'optim.lr' is not an assignment; write key=value"),
        ("train.steps=many", "train.steps is 'many'; input should be a valid integer"),
        ("train.steps=10.5", "train.steps is 10.5; input should be a valid integer"),
        ("train.steps=7.0", "train.steps is 7.0; input should be a valid integer"),
        ("train.compile=1", "train.compile is 1; input should be a valid boolean"),
        ("train.precision=16-true", "train.precision is '16-true'; input should be '32-true' or 'bf16-mixed'"),
        ("model.hidden_size=abc", "model.hidden_size is 'abc'; input should be a valid integer"),
        ("model.num_hidden_layers=2.0", "model.num_hidden_layers is 2.0; input should be a valid integer"),
        ("optim.betas=[0.9]", "optim.betas is [0.9]; field required"),
        ("optim.lr=1e400", "optim.lr is inf; give a finite number"),
        ("optim=fast", "optim is 'fast'; input should be an object"),
        ('data.needles.counts=["a"]', "data.needles.counts.0 is 'a'; input should be a valid integer"),
        ("evaluation.needles=[[2,3]]", "evaluation.needles.0 is [2, 3]; give a pair [N, R]"),
        ("data.mixture.text=much", "data.mixture.text is 'much'"),
        ("data.mixture={}", "data.mixture is {}; give at least one share above 0"),
        ("train.initial_model=3", "train.initial_model is 3; input should be a valid string"),
    ],
)
def test_bad_overrides_are_refused(assignment, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        override(recipe("debug"), [assignment])


@pytest.mark.parametrize(
    "assignment",
    ["train.steps=0", "train.batch_size=-1", "data.length=1", "optim.lr=0", "evaluation.samples=0", "train.threads=-1",
     "optim.weight_decay=-0.1", "data.recall.pairs=0", "optim.eps=-1", "optim.betas=[1.5,2]", "train.seed=-1",
     "train.seed=4294967296", 'data.mixture={"text": -1, "recall": 1}', 'data.mixture={"text": 0}', "data.max_bytes=0",
     "data.needles.counts=[]", "data.needles.queries=[0]", "train.loss_chunk=-5",
     "train.parallel.strategy=zero", "train.parallel.tensor_parallel=0", "train.parallel.stall_seconds=-1"],
)  # fmt: skip
def test_values_out_of_range_are_refused(assignment):
    with pytest.raises(ValueError, match=assignment.split("=")[0].replace(".", r"\.") + r"[.\w]* is .*; \w"):
        override(recipe("debug"), [assignment])


def test_what_is_wrong_with_the_model_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
    def loading(config):
        raise AssertionError("the corpus is read")

    monkeypatch.setattr("diff_transformer.train.loop.load_training_data", loading)
    for fields, message in (
        ({"hidden_size": "abc"}, "model.hidden_size is 'abc'; input should be a valid integer"),
        ({"hidden_size": 65}, "hidden_size 65 is not divisible"),
        ({"max_position_embeddings": 8}, "data.length is 96, more than model.max_position_embeddings 8"),
    ):
        config = recipe("debug")
        config.model |= fields
        with pytest.raises(ValueError, match=re.escape(message)):
            train(config, tmp_path / "run")
    config = recipe("debug")
    config.train.steps = 10.5  # a mistake in Python
    with pytest.raises(ValueError, match=r"train\.steps is 10\.5; input should be a valid integer"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
