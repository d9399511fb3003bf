"""The matched pair in vLLM: throughput, and what bf16 costs. Run it in the environment of ``make test-vllm``.

    .venv-vllm/bin/python benchmarks/serving_engine.py throughput --out benchmarks/results/serving_vllm.json
    .venv-vllm/bin/python benchmarks/serving_engine.py precision --out benchmarks/results/precision_vllm.json

``throughput`` first compares greedy tokens of the engine with those of ``generate``; it stops if they differ. Then both
models take turns in one process, and a row is the median of their turns: tokens/s of prompts and answers together,
and DIFF over Transformer. The engine that is started first decodes 5 to 10 % faster, whichever it is, so a second
process starts them the other way round, and a ratio is the geometric mean of both. ``precision`` needs no quiet
machine.
"""

import os

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, for each engine
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM, matched_baseline
from diff_transformer.bench.record import version_of
from diff_transformer.evals.provenance import provenance

SIDES = ("softmax", "diff")
PAIR = {
    "vocab_size": 2048, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {**PAIR, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
# What requests look like: tokens of the prompt, tokens of the answer.
LOADS = {"prefill heavy": (512, 8), "decode heavy": (32, 128)}
REQUESTS = (1, 8, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("throughput", "precision"))
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--turns", type=int, default=4, help="turns of each model in a row, in each of two processes")
    parser.add_argument("--quick", action="store_true", help="a smaller model, 1 and 4 requests, no compilation")
    parser.add_argument("--dtype", default="float32", help="of weights and cache: float32 or bfloat16")
    parser.add_argument("--first", choices=SIDES, help="time one order only: the model whose engine is started first")
    options = parser.parse_args()
    rows = precision() if options.what == "precision" else throughput(options) if options.first else both_orders()
    record = {
        "benchmark": f"vllm {options.what}", "rows": rows, "vllm": version_of("vllm"),
        "transformers": version_of("transformers"), "settings": {**vars(options), "out": options.out.name},
        "provenance": provenance(device="cpu", dtype=options.dtype),
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=1) + "\n")


def save_pair(folder: Path, fields: dict, dtype: torch.dtype) -> dict[str, DiffTransformerForCausalLM]:
    """Both models of a pair, random, in ``folder/softmax`` and ``folder/diff``."""
    config, models = DiffTransformerConfig(**fields), {}
    for side in SIDES:
        torch.manual_seed(0)
        model = DiffTransformerForCausalLM(config if side == "diff" else matched_baseline(config))
        models[side] = model.to(dtype).eval()
        models[side].save_pretrained(folder / side)
    return models


def both_orders() -> list[dict]:
    """Rows of two processes of this command, one for each order of the engines, as one."""
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for first in SIDES:
            out = Path(folder) / f"{first}.json"
            subprocess.run([sys.executable, *sys.argv, "--first", first, "--out", out], check=True)
            parts.append(json.loads(out.read_text())["rows"])
    rows = []
    for one, other in zip(*parts, strict=True):
        seconds = {side: one["seconds"][side] + other["seconds"][side] for side in SIDES}
        ratios = [math.sqrt(a * b) for a, b in zip(one["ratios"], other["ratios"], strict=True)]
        rows.append({**one, **summary(seconds, ratios, one["requests"] * (one["prompt"] + one["answer"]))})
    return rows


def throughput(options) -> list[dict]:
    """Rows for ``LOADS`` and ``REQUESTS``: our ``generate`` and vLLM."""
    from vllm import LLM, SamplingParams

    dtype = getattr(torch, options.dtype)
    loads = {name: (n // 4, new // 4) for name, (n, new) in LOADS.items()} if options.quick else LOADS
    with tempfile.TemporaryDirectory() as folder:
        models = save_pair(Path(folder), SMALL if options.quick else PAIR, dtype)
        order = (options.first, *(side for side in SIDES if side != options.first))
        engines = {
            side: LLM(
                str(Path(folder) / side), dtype=options.dtype, max_model_len=1024, skip_tokenizer_init=True, seed=0,
                enable_prefix_caching=False, enforce_eager=options.quick, max_num_seqs=max(REQUESTS),
            )
            for side in order
        }  # fmt: skip

        def by_vllm(side: str, rows: list[list[int]], new: int) -> list[list[int]]:
            parameters = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            outputs = engines[side].generate([{"prompt_token_ids": row} for row in rows], parameters, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        def by_generate(side: str, rows: list[list[int]], new: int) -> list[list[int]]:
            ids = torch.tensor(rows)
            out = models[side].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            return out[:, ids.shape[1] :].tolist()

        ways = {"vllm": by_vllm, "generate": by_generate}
        if dtype == torch.float32:
            for side in SIDES:
                rows = draw(4, 40)
                if by_vllm(side, rows, 32) != by_generate(side, rows, 32):
                    raise SystemExit(
                        f"vLLM and generate write different tokens with the {side} model; nothing is timed"
                    )
        found = []
        for load, (length, new) in loads.items():
            for requests in (1, 4) if options.quick else REQUESTS:
                rows = draw(requests, length)
                for way, run in ways.items():
                    found.append(timed_pair(run, rows, new, options.turns) | {
                        "by": way, "load": load, "requests": requests, "prompt": length, "answer": new,
                    })  # fmt: skip
                    print(json.dumps(found[-1]), flush=True)
    return found


def draw(rows: int, length: int) -> list[list[int]]:
    return torch.randint(SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1)).tolist()


def timed_pair(run, rows: list[list[int]], new: int, turns: int) -> dict:
    """``summary`` of both sides, which take turns."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for side in SIDES:
        run(side, rows, new)  # warm-up
    for turn in range(turns):
        for side in SIDES if turn % 2 else reversed(SIDES):
            start = time.perf_counter()
            run(side, rows, new)
            seconds[side].append(time.perf_counter() - start)
    ratios = [softmax / diff for diff, softmax in zip(seconds["diff"], seconds["softmax"], strict=True)]
    return summary(seconds, ratios, len(rows) * (len(rows[0]) + new))


def summary(seconds: dict[str, list[float]], ratios: list[float], tokens: int) -> dict:
    """Median tokens/s of both sides, and the median of the turns' ratios with its quartiles."""
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        **{f"{side}_tokens_per_second": round(tokens / statistics.median(seconds[side]), 1) for side in SIDES},
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)], "turns": len(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "seconds": {side: [round(x, 5) for x in seconds[side]] for side in SIDES},
    }  # fmt: skip


# What bf16 is tried on: six layers, whose lambdas run from 0.2 to 0.67 unless a constant is given.
PRECISION = {
    "vocab_size": 258, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2, "embedding_initializer_range": 1.0,
}  # fmt: skip
PRECISION_CASES = {
    "softmax": {"attention": "softmax"},
    "diff": {"attention": "diff"},
    "diff, lambda_init 0.9": {"attention": "diff", "lambda_init": 0.9},
    "diff, maps that nearly agree": {"attention": "diff", "lambda_init": 0.9},
    "diff_v2": {"attention": "diff_v2"},
    "grouped_diff": {"attention": "grouped_diff"},
}
SEEDS = (0, 1, 2)


def precision() -> list[dict]:
    """Root-mean-square error of log-probabilities in bf16 against fp64: vLLM's, and those of our own model."""
    return [precision_row(case, seed) for case in PRECISION_CASES for seed in SEEDS]


def precision_row(case: str, seed: int) -> dict:
    from vllm import LLM, SamplingParams

    torch.manual_seed(seed)
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**PRECISION, **PRECISION_CASES[case])).eval()
    if "agree" in case:
        bring_maps_together(model)
    model = model.to(torch.bfloat16)
    row = torch.randint(256, (200,)).tolist()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        engine = LLM(
            folder, dtype="bfloat16", max_model_len=256, skip_tokenizer_init=True, enforce_eager=True, max_logprobs=-1
        )
        parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
        output = engine.generate([{"prompt_token_ids": row}], parameters, use_tqdm=False)[0]
        engine.llm_engine.engine_core.shutdown()
        vocabulary = range(model.config.vocab_size)
        by_vllm = torch.tensor([[step[token].logprob for token in vocabulary] for step in output.prompt_logprobs[1:]])
        own = model(torch.tensor([row])).logits.float().log_softmax(-1)[0, :-1]
        exact = model.double()(torch.tensor([row])).logits.log_softmax(-1)[0, :-1]
    errors = {name: float((x.double() - exact).square().mean().sqrt()) for name, x in (("own", own), ("vllm", by_vllm))}
    found = {"case": case, "seed": seed, **{f"{name}_error": round(error, 5) for name, error in errors.items()}}
    found["ratio"] = round(errors["vllm"] / errors["own"], 3)
    print(json.dumps(found), flush=True)
    return found


def bring_maps_together(model) -> None:
    """Make the second map's projections nearly those of the first, so that the maps nearly cancel."""
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                heads = projection.weight.unflatten(0, (-1, 2, model.config.head_dim))
                heads[:, 1] = heads[:, 0] + 0.1 * heads[:, 1]


if __name__ == "__main__":
    main()
