"""Decoders of transformers that ``differentiate`` changed run in vLLM's Transformers backend, as they were saved."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, RECORD, SIZES, tiny
from engine_models import answers, expected, prompts, run_parallel

from diff_transformer import differentiate
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.serving.vllm import checks

PAGE, WINDOW = 32, 20
OTHERWISE = ("GPT-NeoX, Pythia", "GPT-2")  # in vLLM, whatever their attention
TAKEN = [
    row["model"]
    for row in json.loads(RECORD.read_text())["rows"]
    if not row["refused"] and row["model"] not in OTHERWISE
]
V3 = ", as V3"
MODELS = [*TAKEN, f"Qwen3{V3}", f"Phi-3, Phi-4{V3}"]
ROWS = prompts(1, PAGE + 1, 100)


def save(name: str, folder: Path, kind: str = "diff_v2"):
    """A random model with windows that the prompts pass, whose maps differ, in ``folder``."""
    own = ARCHITECTURES[name][1]
    sizes = {"vocab_size": 258, "hidden_size": 32 * own.get("num_attention_heads", 4), "max_position_embeddings": 256}
    others = {"head_dim": 32, "sliding_window": WINDOW, "n_positions": 256}
    sizes |= {key: size for key, size in others.items() if key in own}
    model = differentiate(tiny(name, **sizes), kind)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if "differential" in key else 0.05))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders, answers and log-probabilities of transformers, before an engine changes transformers' classes."""
    found = {}
    for name in MODELS:
        folder = tmp_path_factory.mktemp("model")
        model = save(name.removesuffix(V3), folder, "diff_v3" if name.endswith(V3) else "diff_v2")
        with torch.no_grad():
            logits = model(torch.tensor(ROWS[-1:])).logits[0]
        found[name] = folder, expected(model, ROWS), logits.log_softmax(-1)
    found["Qwen3, diff"] = tmp_path_factory.mktemp("model"), None, None
    save("Qwen3", found["Qwen3, diff"][0], "diff")
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_and_probabilities_of_transformers(name, saved, start_engine):
    from vllm import SamplingParams

    folder, wanted, logprobs = saved[name]
    engine = start_engine(folder, block_size=PAGE)
    assert answers(engine, ROWS) == wanted
    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = engine.generate([{"prompt_token_ids": ROWS[-1]}], parameters, use_tqdm=False)
    for place, step in enumerate(
        output.prompt_logprobs[1:]
    ):  # says more than the tokens, of which some models repeat few
        for token, entry in step.items():
            assert entry.logprob == pytest.approx(float(logprobs[place, token]), abs=5e-5)
    config, groups = engine.model_config.hf_config, engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    assert {group.kv_cache_spec.num_kv_heads for group in groups.kv_cache_groups} == {config.num_key_value_heads}


def test_compiled(saved, start_engine):
    folder, wanted, _ = saved["Qwen3"]
    assert answers(start_engine(folder, block_size=PAGE, enforce_eager=False), ROWS) == wanted


def test_tensor_parallel(saved, tmp_path):
    folder, wanted, _ = saved["Qwen2, Qwen2.5"]
    request = {"folder": str(folder), "options": {"tensor_parallel_size": 2}, "rows": ROWS}
    assert run_parallel(tmp_path, [request])[0]["answers"] == wanted


def test_maps_with_keys_of_their_own_are_refused(saved, start_engine):
    with pytest.raises(ValueError, match=r"in place as 'diff', each of whose maps .*differentiate\(model, 'diff_v2'\)"):
        start_engine(saved["Qwen3, diff"][0])


@pytest.mark.parametrize(("kind", "ranks"), [("Olmo2", 2), ("Phi3", 2), ("Llama", 8)])
def test_ranks_that_do_not_keep_a_head_whole(kind, ranks):
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    checks.check_differential_ranks(config, 1)
    with pytest.raises(ValueError, match=f"tensor_parallel_size is {ranks}, which does not divide the 4 heads of this"):
        checks.check_differential_ranks(config, ranks)
