import pytest

from diff_transformer import DiffTransformerConfig, matched_baseline
from diff_transformer.errors import UserError
from diff_transformer.model.cost import count_parameters, model_cost
from diff_transformer.model.matching import VARIANTS, cost_matched, variant
from diff_transformer.model.presets import PRESETS, preset


def differing(ours, theirs):
    ours, theirs = ours.to_dict(), theirs.to_dict()
    return {key for key in ours if ours[key] != theirs[key]}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("size", PRESETS)
def test_every_variant_of_every_preset_costs_as_much(size, name):
    pair = preset(size, attention="softmax")
    ours = variant(pair, name)
    assert (ours.attention, ours.lambda_learned) == (VARIANTS[name]["attention"], name != "fixed_lambda")
    baseline = matched_baseline(ours)
    assert differing(baseline, pair) <= {"lambda_learned"}  # there and back again
    one, other = model_cost(ours), model_cost(baseline)
    assert one.total_parameters == pytest.approx(other.total_parameters, rel=0.01)
    pays = ("diff_v2", "diff_v3", "grouped_diff", *(("gated",) if size == "debug" else ()))  # elsewhere gates are few
    equal = name not in pays
    assert (ours.intermediate_size == baseline.intermediate_size) == equal
    if equal:
        assert differing(ours, baseline) <= {"attention", "softmax_head_norm"}
        assert one.kv_bytes_per_token == (0 if name == "dint" else other.kv_bytes_per_token)
    if name == "diff":
        assert one.flops_per_token == pytest.approx(other.flops_per_token, rel=0.01)
    if size == "3B":
        assert ours.intermediate_size % 64 == 0


def test_the_normalised_transformer_and_back():
    normalised = variant(preset("debug", head_norm_init=0.1), "softmax_norm")
    assert (normalised.attention, normalised.softmax_head_norm, normalised.head_norm_init) == ("softmax", True, 0.1)
    assert not matched_baseline(normalised).softmax_head_norm
    assert matched_baseline(variant(normalised, "softmax+head_norm=weighted")).core is None
    assert not variant(normalised, "diff").softmax_head_norm


def test_v2_pays_for_its_queries_with_feed_forward():
    """3B: 24 heads of 128 more rows of W_Q, as many as a third of d_model in each of the three feed-forward matrices,
    and 24 rows of W_lambda."""
    ours = variant(preset("3B"), "diff_v2")
    assert ours.intermediate_size == 8192 - 1024
    assert ours.heads.queries == 48
    assert matched_baseline(ours).intermediate_size == 8192


def test_heads_of_grouped_queries_stay_or_fit():
    grouped = cost_matched(preset("3B", num_key_value_heads=8, attention="softmax"), attention="grouped_diff")
    assert grouped.num_key_value_heads == 6  # pairs that divide the 6 noise heads
    plain = preset("3B", num_key_value_heads=8)
    assert cost_matched(plain, attention="diff_v2").num_key_value_heads == 8
    sizes = {"hidden_size": 4096, "num_attention_heads": 40, "head_dim": 128}
    motif = DiffTransformerConfig(attention="grouped_diff", signal_heads_per_noise_head=4, **sizes)
    assert (motif.num_key_value_heads, motif.heads.values, motif.heads.outputs) == (16, 8, 32)
    assert matched_baseline(motif).num_key_value_heads == 40


def test_values_of_another_width_keep_the_cost():
    narrow = preset("debug", value_head_dim=8)
    baseline = matched_baseline(narrow)
    assert baseline.value_head_dim == 4
    assert baseline.intermediate_size == narrow.intermediate_size
    assert cost_matched(baseline, attention="diff").value_head_dim == 8
    with pytest.raises(ValueError, match="value_head_dim 7 of 'diff' is odd; 'softmax' needs its half"):
        matched_baseline(preset("debug", value_head_dim=7))


def test_what_cannot_be_matched_is_refused():
    with pytest.raises(ValueError, match="no variant 'diff_v4'; there are: diff, diff_v2, diff_v3, gated"):
        variant(preset("debug"), "diff_v4")
    with pytest.raises(ValueError, match="do not make groups of 3 signal heads and 1 noise head"):
        variant(preset("2.8B", num_attention_heads=10, num_key_value_heads=10), "grouped_diff")
    with pytest.raises(ValueError, match=r"more than the whole feed-forward \(intermediate_size 8\); give a wider one"):
        variant(preset("debug", intermediate_size=8), "diff_v2")


def test_parts_of_a_core_by_name():
    config = preset("debug")
    made = variant(config, "diff_v2+gate=normed+head_norm=weighted+head_scale=matched")
    assert (made.variant.gate, made.variant.head_norm, made.head_scale) == ("normed", "weighted", "matched")
    assert made.variant.lam == "token"
    assert variant(config, "diff+lambda_init=.5").variant.lambda_init == 0.5
    made_none = variant(config, "diff+head_norm=None+subtract=False").variant
    assert (made_none.head_norm, made_none.subtract) == (None, False)
    assert variant(made, "softmax").core is None
    counts = [
        sum(count_parameters(x).values()) for x in (config, made, variant(config, "gated+gate=normed+head_norm=plain"))
    ]
    assert counts == pytest.approx([counts[0]] * 3, rel=0.01)
    for name, message in (
        ("gate+gate=normed", "no variant 'gate'"),
        ("gated+norm", "has the part 'norm'; give FIELD=VALUE"),
        ("gated+maps=2", "no field of core 'maps'"),
        ("dint+gate=normed", "attention='dint' takes no gate"),
        ("gated+head_norm=weighted", "the head norm cancels a gate before it"),
    ):
        with pytest.raises(UserError, match=message):
            _ = variant(config, name).variant
