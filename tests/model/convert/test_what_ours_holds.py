"""Fields that this package's model has for the sake of other checkpoints."""

import pytest
import torch

from diff_transformer import DiffAttention, DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.model.cost import model_cost
from diff_transformer.model.layers import PolyNorm


def test_poly_norm_in_bf16_takes_powers_in_fp32():
    """In bf16 throughout, three powers and three norms would each be rounded; so only the result is."""
    x = torch.tensor([[3.0e4, -1.7e4, 5.0e3]], dtype=torch.bfloat16)
    exact = PolyNorm().double()(x.double())
    assert torch.equal(PolyNorm().to(torch.bfloat16)(x), _with(PolyNorm(), x).to(torch.bfloat16))
    assert (PolyNorm()(x).double() - exact).abs().max() < 4e-3


def _with(norm, x):
    """The norm with its weights rounded to bf16, computed in fp32."""
    norm.weight.data = norm.weight.data.bfloat16().float()
    return norm(x.float())


def test_models_with_poly_norm_are_counted_saved_and_started(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DiffTransformerConfig(**sizes, hidden_act="poly_norm")
    model = DiffTransformerForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == model_cost(config).total_parameters
    assert model.model.layers[1].mlp.act_fn.weight.tolist() == pytest.approx([1 / 3] * 3)
    torch.nn.init.normal_(model.model.layers[1].mlp.act_fn.weight)
    model.eval().save_pretrained(tmp_path)
    ids = torch.randint(0, 64, (1, 7))
    assert torch.equal(DiffTransformerForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_biases_are_there_when_asked_for():
    plain, biased = DiffAttention(32, 8), DiffAttention(32, 8, bias=True)
    assert not any("bias" in name for name, _ in plain.named_parameters())
    assert [name for name, _ in biased.named_parameters() if "bias" in name] == [
        f"{part}_proj.bias" for part in ("q", "k", "v", "o")
    ]
    biased.load_state_dict(plain.state_dict() | {f"{part}_proj.bias": torch.zeros(32) for part in "qkvo"})
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(biased(x)[0], plain(x)[0])
    biased.o_proj.bias.data.fill_(1.0)
    torch.testing.assert_close(biased(x)[0], plain(x)[0] + 1.0)
