import pytest
import torch
from transformers import OlmoeConfig

from diff_transformer.model.cost import model_cost
from diff_transformer.model.presets import preset
from diff_transformer.train import telemetry
from diff_transformer.train.telemetry import utilisation

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_share_of_a_given_peak():
    use = utilisation(preset("debug"), 96, CPU, "32-true", given=1e12, devices=4)
    flops = model_cost(preset("debug"), length=96).training_flops_per_token
    assert use.of(1e6) == pytest.approx(1e6 * flops / 4e12)
    assert use.formula() == (
        f"MFU = tokens/s x {flops:,} training FLOPs a token (3 x the forward pass at length 96; recomputation not "
        f"counted) / (4 x 1e+12 FLOP/s: train.peak_flops)"
    )


def test_the_peak_of_a_processor_is_measured_once(monkeypatch):
    monkeypatch.setattr(telemetry, "_measured", {})
    calls = []
    monkeypatch.setattr(torch, "mm", lambda a, b: calls.append(a.dtype))
    use = utilisation(preset("debug"), 96, CPU, "bf16-mixed")
    assert set(calls) == {torch.bfloat16}
    assert use.peak == utilisation(preset("debug"), 96, CPU, "bf16-mixed").peak > 0
    assert len(calls) == telemetry._REPEATS + 1
    assert "a measured bfloat16 product" in use.formula()


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
    ],
)
def test_known_devices(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert utilisation(preset("debug"), 96, CUDA, "bf16-mixed").peak == peak


@pytest.mark.parametrize("name", ["Abacus 9000", "NVIDIA L40", "NVIDIA A10G", "NVIDIA RTX A1000"])
def test_an_unknown_device_says_what_to_set(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    use = utilisation(preset("debug"), 96, CUDA, "bf16-mixed")
    assert use.of(1e6) is None
    assert f"the peak of {name!r} is not known; set train.peak_flops" in use.formula()


def test_experts_have_no_utilisation():
    use = utilisation(OlmoeConfig(num_hidden_layers=1), 96, CPU, "32-true", given=1e12)
    assert use.of(1e6) is None
    assert use.formula() == "MFU is not reported: the FLOPs of a mixture of experts are not counted"
