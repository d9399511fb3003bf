import pytest
import torch

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.bench.throughput import measure_throughput
from diff_transformer.model.presets import preset


def test_both_models_are_timed_and_left_as_they_were():
    models = {
        f"{side}-seed0": DiffTransformerForCausalLM(preset("debug", attention=side)) for side in ("diff", "softmax")
    }
    before = [parameter.clone() for model in models.values() for parameter in model.parameters()]
    results = measure_throughput(models, torch.randint(0, 512, (2, 16)), repeats=3)
    assert [*results] == list(models)
    for result in results.values():
        assert len(result.rows) == 3
        for kind in ("train", "forward"):
            seen = sorted(row[f"{kind}_tokens_per_second"] for row in result.rows)
            assert seen[0] > 0
    after = [parameter for model in models.values() for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_models_are_timed_in_the_precision_of_their_training(precision, dtype):
    model, seen = DiffTransformerForCausalLM(preset("debug")), set()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, x, y: seen.add(y.dtype))
    results = measure_throughput({"m": model}, torch.randint(0, 512, (2, 16)), precision=precision, repeats=1)
    assert seen == {dtype}
    assert results["m"].about["precision"] == precision


def test_the_timed_step_is_that_of_the_run():
    model, seen = DiffTransformerForCausalLM(preset("debug")), []

    def note(module, inputs, found):
        if module.training:
            seen.append(len(found.last_hidden_state))

    model.model.register_forward_hook(note)
    ids = torch.randint(0, 512, (5, 16))
    measure_throughput({"m": model}, ids, pass_rows=2, loss_chunk=8, repeats=1)
    assert seen[:3] == [2, 2, 1]
