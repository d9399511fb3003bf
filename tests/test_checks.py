"""No size may be zero or negative, wherever it is given; files that are not JSON are named."""

import numpy as np
import pytest
import torch

from diff_transformer import DiffAttention, DiffTransformerForCausalLM
from diff_transformer.bench.attention import run_attention_benchmark
from diff_transformer.bench.throughput import measure_throughput
from diff_transformer.checks import first_line, listed, read_json, require_positive
from diff_transformer.data.documents import Document
from diff_transformer.data.filler import Filler
from diff_transformer.data.mixture import Mixture
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.errors import UserError
from diff_transformer.evals import allocation, needle
from diff_transformer.evals.lm import CausalLM
from diff_transformer.evals.outliers import evaluate_outliers
from diff_transformer.model.cost import model_cost
from diff_transformer.model.presets import preset


def test_names_and_values_are_said():
    require_positive(a=1, b=0.5, c=None)
    with pytest.raises(ValueError, match="b is -2; it must be positive"):
        require_positive(a=1, b=-2)
    with pytest.raises(ValueError, match="a is nan"):
        require_positive(a=float("nan"))


@pytest.mark.parametrize("value", ["12", [12], object, np.ones(2)])
def test_what_is_no_number_is_said_with_its_name(value):
    with pytest.raises(UserError, match=r"^size is .*; give a positive number$"):
        require_positive(size=value)


def test_long_lists_end_in_a_count():
    assert listed(["a", "b"]) == "a, b"
    assert listed([f"n{i}" for i in range(11)]) == "n0, n1, n2, n3, n4, n5, n6, n7 and 3 more"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one\ntwo"), "one"),
        (OSError(), "OSError"),
        (KeyError("added_tokens"), "KeyError: 'added_tokens'"),
        (Exception("\n no such thing "), "no such thing"),
    ],
)
def test_the_first_line_of_an_error_tells_what_it_is(error, said):
    assert first_line(error) == said


@pytest.fixture(scope="module")
def lm():
    return CausalLM(DiffTransformerForCausalLM(preset("debug", vocab_size=258)), byte_tokenizer(), "tiny")


def calls(lm):
    filler, ids = Filler([Document("d", "some words here. " * 50)]), torch.zeros(1, 8, dtype=torch.long)
    return {
        "per_cell": lambda: needle.evaluate_needle(lm, filler, needle.Settings(samples=0)),
        "length": lambda: allocation.evaluate_allocation(lm, filler, allocation.Settings(length=-1)),
        "needles": lambda: allocation.evaluate_allocation(lm, filler, allocation.Settings(needles=0)),
        "block": lambda: evaluate_outliers(lm, ids, block=0),
        "repeats": lambda: measure_throughput({"m": lm.model}, ids, repeats=0),
        "steps": lambda: measure_throughput({"m": lm.model}, ids, steps=-1),
        "batch_size": lambda: CausalLM(lm.model, lm.tokenizer, "m", batch_size=0),
        "max_new_tokens": lambda: lm.generate(["a"], 0),
        "head_dim": lambda: DiffAttention(32, 4, head_dim=-8),
        "context_size": lambda: DiffAttention(32, 4, context_size=0),
        "bytes_per_value": lambda: model_cost(lm.model.config, bytes_per_value=0),
    }


@pytest.mark.parametrize("name", calls(None))
def test_sizes_are_checked(lm, name):
    with pytest.raises(ValueError, match=rf"{name} is (0|-\d+); it must be positive"):
        calls(lm)[name]()


def test_benchmark_and_mixture():
    with pytest.raises(ValueError, match="repeats is 0"):
        run_attention_benchmark([], repeats=0)
    with pytest.raises(ValueError, match="batch_size"):
        Mixture({"a": type("S", (), {"length": 4})()}, {"a": 1.0}, 0)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": "\xff"}', b"[" * 10**5, b"9" * 5000])
def test_a_file_that_is_not_json_is_named(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json is not JSON \(.+\); restore it from a copy$"):
        read_json(tmp_path / "a.json")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "nothing.json")
