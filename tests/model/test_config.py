import numpy as np
import pytest
from transformers import AutoConfig

import diff_transformer.model.modeling  # noqa: F401  (registers the configuration)
from diff_transformer import DiffTransformerConfig
from diff_transformer.model.cost import model_cost
from diff_transformer.model.presets import preset


def test_heads_are_counted_as_in_the_matched_transformer():
    config = preset("3B")
    assert (config.num_attention_heads, config.num_diff_heads, config.head_dim) == (24, 12, 128)
    assert config.intermediate_size == 8192
    assert preset("830M").head_dim == 96


@pytest.mark.parametrize(
    ("name", "billions"), [("830M", 0.83), ("1.4B", 1.4), ("2.8B", 2.8), ("6.8B", 6.8), ("13.1B", 13.1)]
)
def test_paper_sizes(name, billions):
    assert model_cost(preset(name)).total_parameters / 1e9 == pytest.approx(billions, rel=0.015)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 30}, "hidden_size 30 is not divisible by num_attention_heads 4"),
        ({"num_key_value_heads": 1}, "do not make pairs, each with keys for both maps"),
        ({"intermediate_size": -4}, "intermediate_size is -4; give a positive whole number"),
        ({"head_dim": "12"}, "head_dim is '12'; give a positive whole number"),
        ({"attention": "linear"}, "no attention 'linear'; there are: diff, diff_v2, diff_v3, gated, grouped_diff"),
        ({"head_norm": "layer"}, "no head_norm 'layer'; there are: True, False, no_weight"),
        ({"backend": "tritn"}, r"no backend 'tritn' \(did you mean 'triton'\?\); there are: auto, reference"),
        ({"head_norm": False, "head_norm_init": 0.1}, "head_norm_init=0.1 sets the weight"),
        ({"head_norm_init": "matched"}, "head_norm_init is 'matched'; give a number, or one for each layer"),
        ({"head_dim": 7}, "head_dim is 7; rotary embedding needs an even width"),
        ({"head_nrom": False}, "has no field 'head_nrom' .did you mean 'head_norm'"),
    ],
)
def test_bad_values_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DiffTransformerConfig(**{"hidden_size": 32, "num_attention_heads": 4, **fields})


def test_config_survives_saving(tmp_path):
    config = preset("debug", lambda_init=0.5, head_norm="no_weight", num_key_value_heads=2)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, DiffTransformerConfig)
    assert loaded.to_diff_dict() == config.to_diff_dict()


def test_sizes_of_numpy_are_numbers():
    config = preset("debug", hidden_size=np.int64(32))
    assert type(config.hidden_size) is int
    assert config.to_json_string()
