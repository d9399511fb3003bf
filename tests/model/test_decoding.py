"""Cached decoding in one call of the CPU kernel equals the modules, however they are wrapped, hooked or moved."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from diff_transformer.model.attention import DiffAttention
from diff_transformer.model.heads import CORES
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.model.presets import preset
from diff_transformer.ops.cpu import decode
from diff_transformer.ops.cpu.library import available
from diff_transformer.testing import assert_within_budget

pytestmark = pytest.mark.skipif(not available(), reason="the CPU kernel is not built on this machine")

VARIANTS = {
    "diff": {"head_norm_init": 0.7},
    "plain norm": {"head_norm": "no_weight"},
    "no norm": {"head_norm": False},
    "diff_v2": {"attention": "diff_v2"},
    "diff_v3": {"attention": "diff_v3"},
    "diff_v3, norm": {"attention": replace(CORES["diff_v3"], head_norm="weighted", head_norm_init=0.7)},
    "diff_v2, gate": {"attention": replace(CORES["diff_v2"], gate="result")},
    "grouped_diff": {"attention": "grouped_diff", "num_heads": 8, "num_key_value_heads": 4},
}


@pytest.fixture
def calls(monkeypatch):
    """One entry for each call of the kernel."""
    made, check = [], decode.check
    monkeypatch.setattr(decode, "check", lambda status: made.append(1) or check(status))
    return made


def make(dtype, num_heads=4, num_key_value_heads=2, **settings):
    torch.manual_seed(0)
    layer = DiffAttention(
        64, num_heads, num_key_value_heads=num_key_value_heads, head_dim=24, layer_index=2, **settings
    )
    for parameter in layer.core.parameters():
        nn.init.normal_(parameter, mean=0.3, std=0.4)
    return layer.to(dtype).requires_grad_(False).eval()


def rows_of(dtype, T):
    """Hidden states of T queries, and of 31 keys."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, length, 64, generator=generator).to(dtype) for length in (T, 31)]


def modules_alone(compute, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "available", lambda: False)
        return compute(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_call_equals_the_modules(variant, T, dtype, calls):
    layer = make(dtype, **VARIANTS[variant])
    hidden, memory = rows_of(dtype, T)
    with torch.no_grad():
        fused = layer(hidden, memory)[0]
        assert len(calls) == 1
        eager = modules_alone(layer, hidden, memory)[0]
        exact = modules_alone(layer.double(), hidden.double(), memory.double())[0]
    assert len(calls) == 1
    assert_within_budget(fused, exact, eager)


@pytest.mark.parametrize("variant", ["diff", "diff_v2", "diff_v3"])
def test_the_modules_run_where_they_have_to(variant, calls):
    layer, (hidden, memory) = make(torch.float32, **VARIANTS[variant]), rows_of(torch.float32, 1)
    core = layer.core

    def fused():
        before = len(calls)
        layer(hidden, memory)
        return len(calls) > before

    assert fused()
    attend = core.attend
    core.attend = lambda *args, **options: attend(*args, **options)  # as an evaluation looks inside
    assert not fused()
    del core.attend
    core.requires_grad_(True)
    assert not fused()
    with torch.no_grad():
        assert fused()
        core.backend = "reference"
        assert not fused()


@pytest.mark.parametrize("T", [1, 8])  # of which the kernel takes the first
def test_lambda_is_computed_once(T, calls):
    layer, (hidden, memory), seen = make(torch.float32, attention="diff_v2"), rows_of(torch.float32, T), []
    layer.core.lam.register_forward_hook(lambda *_: seen.append(1))
    layer(hidden, memory)
    assert (len(seen), len(calls)) == (1, T == 1)


# Parts that something wraps.

PARTS = {"head_norm": ("core.head_norm", "weight"), "lam": ("core.lam", "lambda_q1")}  # whose weights the kernel reads


@torch.no_grad()
def call(layer):
    """One query over 31 keys."""
    return layer(*rows_of(torch.float32, 1))[0]


def replace_module(layer, name, new):
    path, _, last = name.rpartition(".")
    setattr(layer.get_submodule(path), last, new)


class Saved(nn.Module):
    """Computes with a copy and shows the original's attributes, as a wrapper of fine-tuned modules does."""

    def __init__(self, original, factor=-1.5):
        super().__init__()
        self.original, self.tuned = original, copy.deepcopy(original)
        for parameter in self.tuned.parameters():
            parameter.mul_(factor)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)

    def forward(self, *args, **kwargs):
        return self.tuned(*args, **kwargs)


class Scaled(nn.Module):
    def forward(self, x):
        return -1.5 * x


# Each takes the layer, a module's name and the module, and changes what the module computes.


def forward_hook(layer, name, module, weight):
    module.register_forward_hook(lambda module, args, out: -1.5 * out)


def replaced_forward(layer, name, module, weight):
    original = module.forward
    module.forward = lambda *args, **kwargs: -1.5 * original(*args, **kwargs)


def subclass(layer, name, module, weight):
    kind = type(module)
    module.__class__ = type(
        "Sub", (kind,), {"forward": lambda self, *args, **kw: -1.5 * kind.forward(self, *args, **kw)}
    )


def wrapper(layer, name, module, weight):
    replace_module(layer, name, Saved(module))


def parametrization(layer, name, module, weight):
    parametrize.register_parametrization(module, weight, Scaled())


def pruning(layer, name, module, weight):
    prune.random_unstructured(module, weight, amount=0.5)


def offloaded(layer, name, module, weight):
    """The weight is there only while the module computes, as accelerate's hooks do it."""
    kept, original = getattr(module, weight).detach().clone(), module.forward

    def forward(*args, **kwargs):
        module._parameters[weight] = nn.Parameter(-1.5 * kept, requires_grad=False)
        out = original(*args, **kwargs)
        module._parameters[weight] = nn.Parameter(kept.to("meta"), requires_grad=False)
        return out

    module.forward = forward
    module._parameters[weight] = nn.Parameter(kept.to("meta"), requires_grad=False)


def freed(layer, name, module, weight):
    """The storage is there only while the module computes, as sharding does it."""
    values = getattr(module, weight)
    kept, storage = values.detach().clone(), values.untyped_storage()
    size = storage.nbytes()

    def fill(module, args):
        storage.resize_(size)
        values.copy_(-1.5 * kept)

    def free(module, args, out):
        storage.resize_(0)

    module.register_forward_pre_hook(fill)
    module.register_forward_hook(free)
    storage.resize_(0)


WRAPPERS = [forward_hook, replaced_forward, subclass, wrapper, parametrization, pruning, offloaded, freed]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_a_wrapped_part_computes_what_it_says(wrap, part):
    layer, (name, weight) = make(torch.float32), PARTS[part]
    before = call(layer)
    wrap(layer, name, layer.get_submodule(name), weight)
    wrapped = call(layer)
    torch.testing.assert_close(wrapped, modules_alone(call, layer))
    assert (wrapped - before).abs().max() > 1e-3  # else nothing was tested


@pytest.mark.parametrize("part", PARTS)
def test_a_swapped_weight_is_used(part):
    layer, (name, weight) = make(torch.float32), PARTS[part]
    before, module = call(layer), layer.get_submodule(name)
    other = {f"{name}.{weight}": torch.full_like(getattr(module, weight), 0.3)}
    swapped = torch.func.functional_call(layer, other, tuple(rows_of(torch.float32, 1)))[0]
    getattr(module, weight).fill_(0.3)
    torch.testing.assert_close(swapped, modules_alone(call, layer))
    assert (swapped - before).abs().max() > 1e-3


def test_hooks_on_every_module_are_called():
    layer = make(torch.float32)
    before, seen = call(layer), []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        after = call(layer)
    assert {layer.core.lam, layer.core.head_norm} <= set(seen)
    torch.testing.assert_close(after, before)


# Libraries that wrap models.


def model():
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(preset("debug", head_norm_init=0.7)).requires_grad_(False).eval()


def steps(model):
    """Logits of three cached steps of one token."""
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        out = model(ids[:, :5], use_cache=True)
        logits = []
        for i in range(5, 8):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values)
            logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "device_map"])
def test_accelerate_offloads(how, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    whole, expected = model(), steps(model())
    if how == "cpu_offload":
        accelerate.cpu_offload(whole, execution_device=torch.device("cpu"))
    elif how == "disk_offload":
        accelerate.disk_offload(whole, tmp_path, execution_device=torch.device("cpu"))
    else:
        devices = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
        devices["lm_head"] = "cpu"
        accelerate.dispatch_model(whole, devices, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    torch.testing.assert_close(steps(whole), expected)


@pytest.mark.parametrize("how", ["lora", "saved_norm", "saved_lambda", "ln_tuning"])
def test_peft_adapts(how):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = {
        "lora": lambda: peft.LoraConfig(
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False
        ),
        "saved_norm": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["head_norm"]),
        "saved_lambda": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lam"]),
        "ln_tuning": lambda: peft.LNTuningConfig(target_modules=["head_norm"]),
    }[how]()
    before, adapted = steps(model()), peft.get_peft_model(model(), config).eval()
    for name, parameter in adapted.named_parameters():
        if "default" in name or "ln_tuning_layers" in name:
            parameter.data.mul_(3)
    out = steps(adapted)
    torch.testing.assert_close(out, modules_alone(steps, adapted))
    assert (out - before).abs().max() > 1e-3
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(steps(merged), out, atol=1e-4, rtol=1e-4)
