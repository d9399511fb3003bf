from dataclasses import replace

import pytest
import torch

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.bench import throughput
from diff_transformer.bench.record import Deadline
from diff_transformer.bench.throughput import GPU_SETTINGS, ThroughputSetting, layers_that_fit, measure_throughput
from diff_transformer.bench.timing import Times
from diff_transformer.model.cost import count_parameters, model_cost
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


def test_the_timed_step_is_that_of_the_run():
    model, seen = DiffTransformerForCausalLM(preset("debug")), []

    def note(module, inputs, found):
        if module.training:
            seen.append(len(found.last_hidden_state))

    model.model.register_forward_hook(note)
    ids = torch.randint(0, 512, (5, 16))
    measure_throughput({"m": model}, ids, pass_rows=2, loss_chunk=8, repeats=1, steps=1, warmup=0)
    assert seen == [2, 2, 1]


TINY = ThroughputSetting("debug", 2, 16, layers=1, dtype=torch.float32)


def test_both_sides_of_a_setting(kept_times):
    times = kept_times(throughput)
    record = throughput.run_throughput_benchmark([TINY], repeats=2)
    softmax, diff = record["rows"]
    assert (softmax["side"], diff["side"]) == ("softmax", "diff")
    assert (diff["layers"], diff["layers_of_preset"]) == (1, 2)
    assert diff["parameters"] == softmax["parameters"] + 6 * 8
    for kind in throughput.KINDS:
        assert softmax[f"{kind}_ratio"] == 1.0
        assert diff[f"{kind}_ratio"] == round(times["softmax", kind].over(times["diff", kind]), 4)
    flops = model_cost(TINY.config(1), length=16).training_flops_per_token
    peak = record["provenance"]["ceilings"]["matmul_tflops"]["float32"] * 1e12
    mfu = diff["forward_backward_tokens_per_second"] * flops / peak
    assert diff["forward_backward_mfu"] == pytest.approx(mfu, rel=0.02, abs=1e-4)


def test_both_models_are_compiled_where_the_setting_says_so(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: compiled.append(model.config.attention))
    rows = throughput.run_throughput_benchmark([replace(TINY, compiled=True), TINY], repeats=1)["rows"]
    assert compiled == ["softmax", "diff"]
    assert [row["compiled"] for row in rows] == [True, True, False, False]


def test_rates_of_known_times():
    times, baseline = Times(0.5, 0.25, 1.0, (0.5,) * 7), Times(0.4, 0.4, 0.4, (0.4,) * 7)
    assert throughput.rates("prefill", times, baseline, tokens=1000, seconds_per_token=1e-4) == {
        "prefill_tokens_per_second": 2000.0,
        "prefill_quartiles": [1000.0, 4000.0],
        "prefill_turns": 7,
        "prefill_ratio": 0.8,
        "prefill_mfu": 0.2,
    }


def test_a_step_leaves_no_gradients_and_a_prefill_fills_a_cache(monkeypatch):
    from diff_transformer.bench.generation import build_pair

    model = build_pair(TINY.config(1), "cpu", torch.float32)["diff"]
    seen, forward = [], model.forward

    def watched(*args, **options):
        out = forward(*args, **options)
        seen.append(out)
        return out

    model.forward = watched
    runs = throughput.calls(model, torch.randint(0, 512, (2, 16)))
    runs["forward_backward"]()
    assert seen[-1].loss.item() > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    runs["prefill"]()
    assert seen[-1].logits.shape == (2, 1, 512)
    assert seen[-1].past_key_values.get_seq_length() == 16


def test_weights_are_in_bf16_and_lambda_is_not():
    from diff_transformer.bench.generation import build_pair

    pair = build_pair(TINY.config(1), "cpu", torch.bfloat16)
    dtypes = {name.rsplit(".", 1)[-1]: p.dtype for name, p in pair["diff"].named_parameters()}
    assert dtypes.pop("lambda_q1") == torch.float32
    assert dtypes["weight"] == torch.bfloat16


def test_layers_are_cut_to_the_memory(monkeypatch):
    """13B: weights of both models and gradients of one are 6 bytes a parameter."""
    setting = ThroughputSetting("13.1B", 4, 2048)
    sizes = [sum(count_parameters(setting.config(n)).values()) for n in (1, 2)]
    a_layer = 6 * (sizes[1] - sizes[0]) + 4 * 2048 * 5120 * throughput.ACTIVATION_BYTES
    fixed = 6 * (2 * sizes[0] - sizes[1]) + 4 * 2048 * 100_288 * throughput.LOGIT_BYTES
    for layers in (1, 7, 40):
        free = (fixed + (layers + 0.5) * a_layer) / throughput.USED_MEMORY
        monkeypatch.setattr(throughput, "free_memory", lambda device, free=free: free)
        assert layers_that_fit(setting, "cuda") == layers
    monkeypatch.setattr(throughput, "free_memory", lambda device: 1e15)
    assert layers_that_fit(setting, "cuda") == 40
    assert layers_that_fit(setting, "cpu") == 40


def test_table_7():
    assert {(s.model, s.length) for s in GPU_SETTINGS} == throughput.PAPER.keys()
    assert all(s.config(1).head_dim == 128 for s in GPU_SETTINGS)


def test_time_runs_out_between_settings(monkeypatch):
    seen = []
    monkeypatch.setattr(Deadline, "passed", lambda self: len(seen) > 0)
    record = throughput.run_throughput_benchmark([TINY, TINY], repeats=1, on_row=seen.append)
    assert len(record["rows"]) == 2
    assert record["unfinished"] == "out of time before debug at 16"
