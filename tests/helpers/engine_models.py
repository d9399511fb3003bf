"""Random models, prompts and answers for the tests on vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.data.tokenizer import byte_tokenizer

SIZES = {
    "vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
    "embedding_initializer_range": 1.0, "lambda_std": 0.3,
}  # fmt: skip


def build(folder, **fields):
    """Save a random model with a byte tokenizer; attention matters in it, so that its tokens vary."""
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**{**SIZES, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(2.0)
            if "head_norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]


def ask(engine, rows: list[list[int]], tokens: int = 24, **options) -> list:
    """The engine's greedy answers to ``rows`` of token ids, all sent at once."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **options)
    outputs = engine.generate([{"prompt_token_ids": row} for row in rows], parameters, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def answers(engine, rows: list[list[int]], tokens: int = 24, **options) -> list[list[int]]:
    """The token ids of ``ask``."""
    return [list(output.token_ids) for output in ask(engine, rows, tokens, **options)]


def expected(model, rows: list[list[int]], tokens: int = 24) -> list[list[int]]:
    """The answers of our own ``generate`` to each row alone."""
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def answer(row: list[int]) -> list[int]:
        ids = torch.tensor([row])
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(row) :].tolist()

    return [answer(row) for row in rows]


def run_parallel(scratch: Path, requests: list[dict]) -> list[dict]:
    """The results of ``tests/vllm/run_parallel.py`` for engines of several processes, in a process of its own."""
    helpers = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, helpers.parent / "vllm" / "run_parallel.py", json.dumps(requests)],
        cwd=scratch, capture_output=True, text=True, timeout=800,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join([str(helpers), os.environ.get("PYTHONPATH", "")]),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OMP_NUM_THREADS": "1",
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((scratch / "answers.json").read_text())
    assert not any("error" in one for one in found), next(one["error"] for one in found if "error" in one)
    return found
