"""The example under ``transformers.Trainer``: decay groups, resuming, loading."""

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.presets import preset

SHORT = {"steps": 4, "batch": 2, "kilobytes": 40}


@pytest.fixture(scope="module")
def whole(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, example("transformers_trainer").main(folder, **SHORT)


def test_trains_saves_and_loads(whole):
    folder, losses = whole
    assert losses.keys() == {"softmax", "diff"}
    for side in losses:
        loaded = AutoModelForCausalLM.from_pretrained(folder / side / "model")
        assert loaded.config.attention == side
        assert (folder / side / "model" / "tokenizer.json").exists()
        assert losses[side] < 7.0  # log 1024 = 6.93 at the start, and it falls


def test_an_interrupted_run_goes_on_to_the_same_weights(example, whole, tmp_path):
    module = example("transformers_trainer")
    assert module.main(tmp_path, **SHORT, stop_after=3) == {}
    assert not (tmp_path / "diff" / "model").exists()
    assert module.main(tmp_path, **SHORT) == whole[1]
    for side in ("softmax", "diff"):
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(folder / side / "model").state_dict()
            for folder in (tmp_path, whole[0])
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_decay_is_on_matrices_only(example, tmp_path):
    model = DiffTransformerForCausalLM(preset("debug"))
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, weight_decay=0.1)
    trainer = example("transformers_trainer").MatrixDecay(model, arguments)
    decayed = set(trainer.get_decay_parameter_names(model))
    kept = {name for name, _ in model.named_parameters()} - decayed
    assert {name.split(".")[-2 if name.endswith("weight") else -1] for name in kept} == {
        "head_norm", "input_layernorm", "post_attention_layernorm", "norm",
        "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2",
    }  # fmt: skip
    groups = trainer.create_optimizer().param_groups
    by_decay = {group["weight_decay"]: {p.ndim for p in group["params"]} for group in groups}
    assert by_decay == {0.1: {2}, 0.0: {1}}


@pytest.mark.slow
def test_the_whole_example(example, tmp_path):
    losses = example("transformers_trainer").main(tmp_path)
    assert max(losses.values()) < 6.0
