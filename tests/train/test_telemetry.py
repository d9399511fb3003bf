import pytest
import torch
from transformers import OlmoeConfig

from diff_transformer.lab.recipes import recipe
from diff_transformer.model.cost import model_cost
from diff_transformer.model.presets import preset
from diff_transformer.train.config import override
from diff_transformer.train.plan import resolve
from diff_transformer.train.telemetry import describe, utilisation

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_share_of_a_given_peak():
    use = utilisation(preset("debug"), 96, CPU, given=1e12, devices=4)
    flops = model_cost(preset("debug"), length=96).training_flops_per_token
    assert use.of(1e6) == pytest.approx(1e6 * flops / 4e12)
    assert utilisation(preset("debug"), 96, CPU).of(1e6) is None


def test_a_run_says_what_it_will_do():
    plan = resolve(override(recipe("debug"), ["train.steps=1000000", "train.peak_flops=1e9", "data.corpus=novels"]))
    lines = describe(plan).splitlines()
    assert lines[0].startswith("debug: diff, 37,")
    assert lines[1] == "1,000,000 steps of 8 rows of 96 tokens, 768,000,000 in all, of novels"
    assert lines[2] == "1 process (single), 32-true; a checkpoint every 10 steps"
    assert lines[3] == "about 6 days"
    assert all(len(line) <= 80 for line in lines)


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
    assert utilisation(preset("debug"), 96, CUDA).peak == peak


@pytest.mark.parametrize("name", ["Abacus 9000", "NVIDIA L40", "NVIDIA A10G", "NVIDIA RTX A1000"])
def test_an_unknown_device_has_no_peak(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert utilisation(preset("debug"), 96, CUDA).of(1e6) is None


def test_experts_have_no_utilisation():
    use = utilisation(OlmoeConfig(num_hidden_layers=1), 96, CPU, given=1e12)
    assert use.of(1e6) is None
