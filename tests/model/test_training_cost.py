"""The cost of training: states to the byte, activations against what autograd really saves, time worked by hand."""

import gc

import pytest
import torch

from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.cost import activation_bytes, training_memory
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.model.presets import preset
from diff_transformer.testing import held_memory
from diff_transformer.train.recompute import recompute


def saved_bytes(config, rows, length, *, mixed, checkpointing=False):
    """Bytes of the distinct storages that a forward pass keeps for the backward, without the weights themselves."""
    model = DiffTransformerForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {shape for p in model.parameters() for shape in (tuple(p.shape), tuple(p.shape)[::-1])}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        copy_of_a_weight = mixed and tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes
        if storage.data_ptr() not in weights and not copy_of_a_weight:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, config.vocab_size, (rows, length))
    kept_by, computed_in = torch.autograd.graph.saved_tensors_hooks, torch.autocast
    with kept_by(pack, lambda tensor: tensor), computed_in("cpu", torch.bfloat16, enabled=mixed):
        model.model(ids, use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize("attention", ["diff", "softmax"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("fields", [{}, {"hidden_size": 256, "num_key_value_heads": 4}, {"head_dim": 32}])
def test_activations_are_what_autograd_saves(attention, mixed, fields):
    rows, length = 3, 61  # a number of tokens that is no width
    one, three = (
        saved_bytes(
            preset("demo", attention=attention, num_hidden_layers=n, **fields), rows, length, mixed=mixed
        )
        for n in (1, 3)
    )  # fmt: skip
    config = preset("demo", attention=attention, **fields)
    predicted = activation_bytes(config, mixed=mixed)["none"]
    assert predicted == pytest.approx((three - one) / 2 / (rows * length), rel=0.03)


def test_checkpointing_keeps_one_vector_a_layer():
    rows, length = 3, 61

    def kept(layers):
        config = preset("demo", num_hidden_layers=layers)
        return saved_bytes(config, rows, length, mixed=False, checkpointing=True)

    def predicted(layers):
        config = preset("demo", num_hidden_layers=layers)
        return training_memory(config, tokens=rows * length, mixed=False, activation_checkpointing="full").activations

    assert predicted(4) - predicted(2) == 2 * rows * length * 4 * 128
    assert kept(4) - kept(2) == pytest.approx(predicted(4) - predicted(2), rel=0.02)


@pytest.mark.parametrize(
    ("attention", "mixed"),
    [
        ("diff", True),
        ("softmax", False),
        pytest.param("diff", False, marks=pytest.mark.slow),
        pytest.param("softmax", True, marks=pytest.mark.slow),
    ],
)
def test_selective_checkpointing_keeps_products_and_attention(attention, mixed):
    """What a forward pass leaves allocated; it grows by as much a token as the cost model says."""

    def held(layers: int, length: int) -> int:
        config = preset("demo", attention=attention, num_hidden_layers=layers, num_key_value_heads=4)
        model, ids, kept = DiffTransformerForCausalLM(config).train(), torch.randint(0, 500, (3, length)), []
        recompute(model, "selective")

        def forward():
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                kept.append(model.model(ids, use_cache=False).last_hidden_state)

        gc.collect()  # models of earlier calls, which hold themselves
        return held_memory(forward)

    config = preset("demo", attention=attention, num_key_value_heads=4)
    of_two_layers = held(3, 200) - held(3, 100) - (held(1, 200) - held(1, 100))
    assert of_two_layers / (2 * 3 * 100) == pytest.approx(activation_bytes(config, mixed=mixed)["selective"], rel=0.03)


def test_states_are_weights_gradients_and_two_moments():
    config = preset("debug")
    model = DiffTransformerForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randint(0, 512, (2, 8)), labels=torch.randint(0, 512, (2, 8)), use_cache=False).loss.backward()
    optimizer.step()
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [s for state in optimizer.state.values() for name, s in state.items() if name != "step"]
    measured = sum(t.numel() * t.element_size() for t in tensors)
    assert training_memory(config, tokens=16).states == measured
    assert training_memory(config, tokens=16, devices=8).states == -(-measured // 8)


def test_chunked_loss_and_shards_by_hand():
    config = DiffTransformerConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    whole, chunked = (training_memory(config, tokens=500, loss_chunk=chunk) for chunk in (0, 100))
    assert whole.logits == 500 * 1000 * (2 + 4 + 4)
    assert chunked.logits == whole.logits / 5
    assert whole.gathered == 0
    assert training_memory(config, tokens=500, devices=2).gathered > 2 * 1000 * 64


def test_tensor_parallel_divides_all_but_the_residual_stream():
    config = preset("demo")
    whole, half = (training_memory(config, tokens=500, devices=2, tensor_parallel=ways) for ways in (1, 2))
    for part in ("weights", "optimizer", "gathered", "logits"):
        assert getattr(half, part) == pytest.approx(getattr(whole, part) / 2, abs=2)
    stream = 500 * config.num_hidden_layers * 26 * config.hidden_size
    assert half.activations - stream == pytest.approx((whole.activations - stream) / 2)
