"""Against transformers' DiffLlama: logits both ways, and round trips."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.convert import convert_folder, convert_model
from diff_transformer.testing import assert_within_budget

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPS = pytest.mark.parametrize("kv_heads", [8, 4, 2])


def exact(model, ids):
    """Logits of another implementation in fp64, on the same weights."""
    weights = model.state_dict()
    double = type(model)(model.config).double().eval()
    double.load_state_dict(weights)
    with torch.no_grad():
        return double(ids).logits


@pytest.fixture
def diffllama(randomise):
    def build(**fields):
        return randomise(DiffLlamaForCausalLM(DiffLlamaConfig(**{**SIZES, **fields})))

    return build


@GROUPS
@pytest.mark.parametrize("tied", [False, True])
def test_ours_has_the_logits_of_diffllama(diffllama, ids, kv_heads, tied):
    theirs = diffllama(num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    ours = convert_model(theirs)
    assert ours.config.head_norm == "no_weight"
    assert_within_budget(ours(ids).logits, exact(theirs, ids), what="logits")


@GROUPS
@pytest.mark.parametrize("head_norm", [True, "no_weight"])
def test_diffllama_has_the_logits_of_ours(make, ids, kv_heads, head_norm):
    ours = make(num_key_value_heads=kv_heads, head_norm=head_norm)
    theirs = convert_model(ours, "diffllama")
    assert_within_budget(ours(ids).logits, exact(theirs, ids), what="logits")


def test_head_dim_need_not_divide_the_width(diffllama, ids):
    theirs = diffllama(head_dim=6, num_key_value_heads=4)
    assert_within_budget(convert_model(theirs)(ids).logits, exact(theirs, ids), what="logits")


@GROUPS
def test_there_and_back_moves_rows_only(make, diffllama, kv_heads):
    ours = make(num_key_value_heads=kv_heads, head_norm="no_weight")
    again = convert_model(convert_model(ours, "diffllama"))
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    theirs = diffllama(num_key_value_heads=kv_heads)
    back = convert_model(convert_model(theirs), "diffllama")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_the_fold_is_one_rounding_of_each_number_of_w_o(make):
    ours = make(num_hidden_layers=1)
    layer = ours.model.layers[0].self_attn
    weight = layer.core.head_norm.weight.detach()
    folded = convert_model(ours, "diffllama").model.layers[0].self_attn.o_proj.weight
    columns = torch.cat([layer.o_proj.weight[:, c, None].double() * weight[c % 8].double() for c in range(32)], dim=1)
    assert torch.equal(folded, columns.float())


def test_a_folder_in_bf16_keeps_lambda_in_fp32(make, ids, tmp_path):
    """W_O is rounded to bf16 once more by the fold, unless fp32 is asked for; all else is the same number."""
    ours = make(num_key_value_heads=4).to(torch.bfloat16)
    ours.save_pretrained(tmp_path / "ours")
    notes = convert_folder(tmp_path / "ours", tmp_path / "theirs", target="diffllama")
    assert any("folded into W_O" in note for note in notes)
    theirs = DiffLlamaForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    vector = ours.model.layers[1].self_attn.core.lam.lambda_q1
    assert vector.dtype == torch.float32
    assert torch.equal(theirs.model.layers[1].self_attn.lambda_q1, vector)
    convert_folder(tmp_path / "ours", tmp_path / "wide", target="diffllama", dtype="float32")
    wide = DiffLlamaForCausalLM.from_pretrained(tmp_path / "wide")
    assert wide.dtype == torch.float32
    again = DiffTransformerForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert_within_budget(again(ids).logits, exact(wide, ids), what="logits")
    rounded = wide.model.layers[1].self_attn.o_proj.weight.to(torch.bfloat16).float()
    assert torch.equal(theirs.model.layers[1].self_attn.o_proj.weight, rounded)


def test_lambda_of_a_bf16_model_becomes_fp32_and_stays_so(diffllama, tmp_path):
    theirs = diffllama().to(torch.bfloat16)
    vector = theirs.model.layers[2].self_attn.lambda_k2
    assert vector.dtype == torch.bfloat16
    theirs.save_pretrained(tmp_path / "theirs")
    convert_folder(tmp_path / "theirs", tmp_path / "ours", dtype="float16")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    name = "model.layers.2.self_attn.core.lam.lambda_k2"
    assert written[name].dtype == torch.float32
    assert torch.equal(written[name], vector.float())
    assert {tensor.dtype for key, tensor in written.items() if ".lam." not in key} == {torch.float16}
    assert convert_model(theirs).state_dict()[name].dtype == torch.float32


def test_a_folder_of_theirs_with_scaled_positions(diffllama, ids, tmp_path):
    rope = {"rope_type": "linear", "factor": 3.0, "rope_theta": 50000.0}
    theirs = diffllama(rope_parameters=rope, num_key_value_heads=4, eos_token_id=7)
    theirs.save_pretrained(tmp_path / "theirs")
    convert_folder(tmp_path / "theirs", tmp_path / "ours")
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / "ours")
    assert ours.config.eos_token_id == 7
    assert_within_budget(ours(ids).logits, exact(theirs, ids), what="logits")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "softmax"}, "attention is 'softmax', it holds 'diff'"),
        ({"attention": "diff_v2"}, "attention is 'diff_v2', it holds 'diff'"),
        ({"head_norm": False}, "head_norm is False, it holds True or 'no_weight'"),
        ({"lambda_init": 0.8}, "lambda_init is 0.8, it holds 'depth'"),
        ({"lambda_depth_offset": -1}, "lambda_depth_offset is -1"),
        ({"lambda_learned": False}, "lambda_learned is False"),
        ({"value_head_dim": 4}, "value_head_dim is 4, it holds None or 8"),
        ({"head_norm_eps": 1e-6}, "head_norm_eps is 1e-06, it holds None or 1e-05"),
        ({"hidden_act": "poly_norm"}, "hidden_act is 'poly_norm'"),
        ({"sliding_window": 8}, "sliding_window is 8"),
    ],
)
def test_what_diffllama_cannot_hold_is_named(make, fields, message):
    with pytest.raises(ValueError, match="DiffLlama cannot hold this model") as caught:
        convert_model(make(num_hidden_layers=1, **fields), "diffllama")
    assert message in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("attention_bias", True), ("hidden_act", "gelu")])
def test_what_ours_cannot_hold_is_named(diffllama, field, value):
    with pytest.raises(ValueError, match=f"{field}='?{value}"):
        convert_model(diffllama(**{field: value}))
