"""Tensors pass through in pieces: what is held in memory at a time, and in what order files are written."""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file

from diff_transformer.model.convert.checkpoint import Checkpoint, write_tensors
from diff_transformer.model.convert.plan import Made, Planned, StateDict, check_tensors


class Counting:
    """A source of twelve tensors of 4000 bytes that counts how many bytes of them are alive."""

    def __init__(self):
        self.alive = self.most = 0

    def shapes(self):
        return {f"t{i:02}": (1000,) for i in range(12)}

    def dtype(self, name):
        return torch.float32

    def tensor(self, name):
        made = torch.full((1000,), float(name[1:]))
        self.alive += made.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(made, self._dead, made.nbytes)
        return made

    def _dead(self, count):
        self.alive -= count


def test_one_shard_is_held_at_a_time(tmp_path):
    source = Counting()
    write_tensors(source, tmp_path, shard_bytes=9000)
    assert source.most == 8000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 48000
    assert len(set(index["weight_map"].values())) == 6
    again = Checkpoint(tmp_path)
    assert all(float(again.tensor(name)[0]) == float(name[1:]) for name in source.shapes())


def test_a_chain_of_plans_computes_nothing_before_it_is_asked(tmp_path):
    source = Counting()
    half = Planned(source, {f"h{i:02}": Made((f"t{i:02}",), torch.neg) for i in range(12)}, {
        f"h{i:02}": (1000,) for i in range(12)
    })  # fmt: skip
    whole = Planned(half, {"sum": Made(("h01", "h02"), torch.add)}, {"sum": (1000,)})
    assert source.most == 0
    assert float(whole.tensor("sum")[0]) == -3.0
    assert source.most <= 2 * 4000


def test_a_tensor_that_comes_out_in_another_shape_is_named():
    planned = Planned(StateDict({"a": torch.zeros(2, 3)}), {"b": Made(("a",), torch.Tensor.t)}, {"b": (2, 3)})
    with pytest.raises(ValueError, match=r"b, made of a, has shape \(3, 2\) where the target has \(2, 3\)"):
        planned.tensor("b")


def test_a_dtype_is_for_what_the_plan_leaves_open(tmp_path):
    source = StateDict({"a": torch.full((2,), 1 / 3), "b": torch.full((2,), 1 / 3, dtype=torch.bfloat16)})
    plan = {"a": Made(("a",)), "b": Made(("b",), dtype=torch.float32)}
    write_tensors(Planned(source, plan, source.shapes(), torch.float16), tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert (written["a"].dtype, written["b"].dtype) == (torch.float16, torch.float32)
    assert torch.equal(written["b"], source.tensor("b").float())


def test_what_is_ignored_is_neither_missing_nor_extra():
    check_tensors({"a": (1,), "buffer": (2,)}, {"a": (1,)}, ["buffer"], "a model")
    with pytest.raises(ValueError, match=r"not those of a model\n  1 not known: buffer"):
        check_tensors({"a": (1,), "buffer": (2,)}, {"a": (1,)}, [], "a model")
