import pytest
import torch

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.bench import throughput
from diff_transformer.bench.throughput import measure_throughput
from diff_transformer.model.presets import preset


def test_both_models_are_timed_and_left_as_they_were():
    models = {
        f"{side}-seed0": DiffTransformerForCausalLM(preset("debug", attention=side)) for side in ("diff", "softmax")
    }
    before = [parameter.clone() for model in models.values() for parameter in model.parameters()]
    results = measure_throughput(models, torch.randint(0, 512, (2, 16)), repeats=3, steps=1, warmup=1)
    assert [result.model for result in results] == list(models)
    for result in results:
        assert len(result.rows) == 3
        for kind in ("train", "forward"):
            seen = sorted(row[f"{kind}_tokens_per_second"] for row in result.rows)
            assert result.metrics[f"{kind}_tokens_per_second"] == seen[1] > 0
    after = [parameter for model in models.values() for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_models_are_timed_in_the_precision_of_their_training(precision, dtype):
    model, seen = DiffTransformerForCausalLM(preset("debug")), set()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, x, y: seen.add(y.dtype))
    (result,) = measure_throughput(
        {"m": model}, torch.randint(0, 512, (2, 16)), precision=precision, repeats=1, steps=1
    )
    assert seen == {dtype}
    assert result.provenance["precision"] == precision


def test_a_gpu_is_idle_when_the_clock_starts(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: log.append("clock") or 0.0)
    throughput._time(lambda: log.append("run"), 2, torch.device("cuda"))
    assert log == ["wait", "clock", "run", "run", "wait", "clock"]
