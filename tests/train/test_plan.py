"""The checks of a run, all before anything is loaded; how its batch is shared."""

import pytest
import torch
from transformers import BertConfig, GPT2Config, GraniteConfig, PhiConfig

from diff_transformer.lab.recipes import recipe
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.train.config import override
from diff_transformer.train.plan import check_split, resolve
from diff_transformer.train.training_data import BatchPart


def config(*settings: str):
    return override(recipe("debug"), [f"train.{setting}" for setting in settings])


def test_shares_are_the_batch():
    rows = torch.arange(12)
    assert torch.equal(torch.cat([BatchPart(rank, 4).of(rows) for rank in range(4)]), rows)


@pytest.mark.parametrize(
    ("world", "settings", "strategy"),
    [
        (1, [], "single"), (4, [], "ddp"), (1, ["parallel.strategy=fsdp"], "fsdp"),
        (8, ["parallel.replicas=2"], "fsdp"),
        (2, ["parallel.tensor_parallel=2"], "fsdp"), (2, ["parallel.context_parallel=2"], "ddp"),
        (1, ["micro_batch_size=3"], "single"),
    ],
)  # fmt: skip
def test_the_strategy_follows_from_the_processes(world, settings, strategy):
    assert resolve(config(*settings), world).strategy == strategy


@pytest.mark.parametrize(
    ("world", "settings", "message"),
    [
        (3, [], r"batch_size is 8, which 3 processes with rows of their own do not divide; give a multiple"),
        (4, ["parallel.replicas=3"], r"replicas is 3, which does not divide 4, the processes"),
        (4, ["parallel.tensor_parallel=3"], "groups of 3, which do not divide the 4 processes; start 6"),
        (2, ["parallel.strategy=ddp", "parallel.tensor_parallel=2"], "'ddp', .*: tensor_parallel 2 .* need .* 'fsdp'"),
        (2, ["parallel.strategy=ddp", "parallel.replicas=2"], "'ddp', .* replicas 2 need strategy 'fsdp'"),
        (5, ["parallel.context_parallel=5"], "context_parallel 5 cuts a row into 10 equal pieces, so give a multiple"),
        (1, ["weights=lora"], "adapters of a trained model; give it as train.initial_model"),
        (1, ["weights=dex"], "train.weights is 'dex', and the model has no DEX to train; `convert --to dex` adds it"),
        (1, ["initial_model=/nowhere"], "/nowhere has no config.json; give the folder of a saved model"),
    ],
)
def test_what_contradicts_itself_is_refused(world, settings, message):
    with pytest.raises(ValueError, match=message):
        resolve(config(*settings), world)


@pytest.mark.parametrize(
    ("fields", "ways", "message"),
    [
        ({}, 4, "tensor_parallel is 4, which does not divide 2 output heads, 2 value heads of this model; a head"),
        ({"attention": "softmax"}, 8, "does not divide 4 output heads, 4 value heads, 4 key heads of this model"),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 2, "does not divide 1 value heads"),
        ({"attention": "grouped_diff", "num_attention_heads": 12}, 2, "9 output heads, 3 value heads, 3 noise"),
        ({"vocab_size": 511}, 2, "does not divide 511 words of vocab_size"),
        ({"hidden_act": "poly_norm"}, 2, "norm over the whole feed-forward width, which tensor_parallel=2 splits"),
    ],
)
def test_what_tensor_parallel_cannot_split(fields, ways, message):
    sizes = {"vocab_size": 512, "hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    made = DiffTransformerConfig(**{**sizes, **fields})
    with pytest.raises(ValueError, match=message):
        check_split(made, ways)
    check_split(made, 1)


def test_a_row_of_dint_is_not_shared():
    with pytest.raises(ValueError, match="attention='dint' takes a running mean over the whole row"):
        resolve(override(config("parallel.context_parallel=2"), ["model.attention=dint"]), 2)


def test_a_run_without_a_model_is_refused():
    with pytest.raises(ValueError, match=r"the configuration sets no model; give train.initial_model"):
        resolve(recipe("uptrain"))


@pytest.mark.parametrize(
    ("kind", "fields", "settings", "message"),
    [
        (BertConfig, {"intermediate_size": 48}, [], "cannot be trained: .*BertSelfAttention is not causal"),
        (GraniteConfig, {"logits_scaling": 2.0}, [], r"its logits are more than a product .*\(logits_scaling\)"),
        (PhiConfig, {"intermediate_size": 48}, [], r"its logits are more than a product .*\(a bias\)"),
        (GPT2Config, {}, ["data.documents=separate"], r"documents=separate: .* keeps the class GPT2LMHeadModel"),
    ],
)  # fmt: skip
def test_a_model_of_transformers_that_the_loop_cannot_train_is_refused(
    tmp_path, monkeypatch, kind, fields, settings, message
):
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 512}
    AutoModelForCausalLM.from_config(kind(vocab_size=64, **sizes, **fields)).save_pretrained(tmp_path)
    run = override(config(f"initial_model={tmp_path}"), settings)
    run.model = {}
    with pytest.raises(ValueError, match=message):
        resolve(run)
