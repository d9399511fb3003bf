"""A model exported for engines runs in vLLM's Transformers backend, where neither package nor plugin is used."""

import pytest
from engine_models import answers, expected, prompts

CASES = {
    "diff": {"attention": "diff"},
    "softmax": {"attention": "softmax", "head_dim": 32},
    "diff_v2": {"attention": "diff_v2", "head_dim": 32},
    "grouped_diff": {"attention": "grouped_diff", "num_attention_heads": 8, "head_dim": 16},
    "window": {"attention": "diff", "sliding_window": 20},
    "no head norm, fixed lambda": {"attention": "diff", "head_norm": False, "lambda_learned": False},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_as_generate(case, save_model, start_engine, tmp_path):
    from diff_transformer.inference.export import export

    model, folder = save_model(**CASES[case])
    export(str(folder), tmp_path / "out", for_engines=True)
    rows = prompts(1, 3, 33, 150)
    engine = start_engine(tmp_path / "out", model_impl="transformers", trust_remote_code=True)
    assert answers(engine, rows) == expected(model, rows)
    spec = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    heads = model.config.heads
    assert spec.num_kv_heads * spec.head_size == heads.keys * heads.head_dim  # no more than the matched Transformer
