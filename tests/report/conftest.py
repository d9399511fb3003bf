"""Results of a comparison that never ran, with realistic shapes and sizes, drawn from fixed seeds."""

import base64
import copy
import math

import numpy as np
import pytest

LAYERS, DIFF_HEADS, SOFTMAX_HEADS, LENGTH = 3, 4, 8, 112
PROSE = (
    "The harbour was quiet that morning and the boats lay still . A gull cried once above the long grey wall , "
    "and the keeper of the light came down the stairs with his lamp"
)
NEEDLE = "\nThe magic number of Oslo is 47 .\n"
QUESTION = "\nWhat is the magic number of Oslo ? The magic number of Oslo is"


def make_results(seeds=(0, 1)) -> dict:
    """A whole results.json as a dictionary."""
    draw = np.random.default_rng(7)
    return {
        "schema": 1,
        "title": "DIFF against Transformer at desk scale",
        "recipe": "desk",
        "command": f"diff-transformer compare --recipe desk --seeds {len(seeds)}",
        "created": "2026-03-01T12:00:00+00:00",
        "seconds": 2710.4,
        "provenance": {
            "commit": "0123abc",
            "device": "cpu",
            "cpu": "Example CPU",
            "threads": "2",
            "torch": "2.13.0",
            "transformers": "5.23.0",
            "python": "3.11.9",
            "platform": "Linux x86-64",
            "package_version": "0.1.0",
        },
        "pair": {"diff": _model("diff", 741_216), "softmax": _model("softmax", 740_992)},
        "train": {
            "steps": 600,
            "batch_size": 16,
            "sequence_length": LENGTH,
            "tokens": 600 * 16 * LENGTH,
            "seeds": list(seeds),
            "corpus": "Python library documentation",
            "mixture": {"text": 0.5, "needles": 0.5},
            "lr": 0.002,
            "config": {"name": "desk", "optim": {"lr": 0.002}},
        },
        "claims": _claims(len(seeds)),
        "curves": [_curve(a, s, draw) for a in ("diff", "softmax") for s in seeds],
        "evals": [e for a in ("diff", "softmax") for s in seeds for e in _evals(a, s, draw)],
        "explorer": [
            _explorer(a, title, draw) for title in ("One needle", "A second text") for a in ("diff", "softmax")
        ],
    }


@pytest.fixture
def controlled(results) -> dict:
    """``results`` with the control's number beside the first claim."""
    results = copy.deepcopy(results)
    results["claims"][0]["control"] = {
        "side": "softmax_norm",
        "label": "Transformer + head norm",
        "here": "3.800",
        "values": [3.8, 3.8],
        "verdict": "did not hold",
        "difference": {"mean": 0.103, "low": 0.1, "high": 0.106, "over": "seeds", "relative": False},
    }
    return results


def _model(attention: str, parameters: int) -> dict:
    config: dict = {"attention": attention, "hidden_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 8}
    config |= {"vocab_size": 1024, "intermediate_size": 344, "rope_theta": 10000.0, "head_norm_init": 0.1}
    parts = {"embedding": 131_072, "attention": 196_608, "feed-forward": 396_288, "norms": 896}
    parts["lambda and head norm"] = parameters - sum(parts.values()) - 16_128
    parts["other"] = 16_128
    return {
        "parameters": parameters,
        "parameters_by_part": parts,
        "flops_per_token": 4_400_000 + parameters,
        "config": config,
    }


def _claims(seeds: int) -> list[dict]:
    several = seeds > 1

    def claim(name, words, paper, verdict, source, diff, softmax, better, unit, detail=""):
        gap = sum(diff[:seeds]) / seeds - sum(softmax[:seeds]) / seeds
        return {
            "id": name,
            "claim": words,
            "paper": paper,
            "here": f"{softmax[0]:.3f} / {diff[0]:.3f}",
            "unit": unit,
            "detail": detail or f"difference {gap:+.3f}",
            "verdict": verdict,
            "source": source,
            "diff": diff[:seeds],
            "softmax": softmax[:seeds],
            "better": better,
            "difference": {
                "mean": gap,
                "low": gap - 0.03 if several else None,
                "high": gap + 0.03 if several else None,
                "over": "seeds",
                "relative": False,
            },
        }

    unsure = "undecided" if several else "did not hold"
    return [
        claim("loss", "Lower language-modelling loss", "3.087 / 3.062 (1.4B)", "held", "Table 6, Figure 3",
              [3.903, 3.931, 3.889], [3.950, 3.978, 3.941], "lower", "nats a token"),
        claim("needle_n4_r2", "4 needles, 2 asked for: more of them found", ".62 / .84 (4K, 3B)", unsure, "Table 2",
              [0.40, 0.33, 0.38], [0.31, 0.37, 0.36], "higher", "accuracy", "mean over 5 depths"),
        claim("answer", "More attention on the answer", ".05 / .32 (mean of depths)", "held", "Table 3",
              [0.21, 0.19, 0.20], [0.08, 0.09, 0.08], "higher", "share"),
        claim("logits", "Smaller largest attention logit", "318.0 / 38.8", "did not hold", "Table 5",
              [24.1, 22.0, 23.5], [17.3, 16.9, 17.0], "lower", "magnitude"),
    ]  # fmt: skip


def _curve(attention: str, seed: int, draw: np.random.Generator) -> dict:
    steps = np.arange(0, 601, 5)
    floor = 3.86 if attention == "diff" else 3.92
    smooth = floor + 0.03 * seed + 3.0 * np.exp(-steps / 60)
    curve = {
        "attention": attention,
        "seed": seed,
        "step": steps.tolist(),
        "loss": (smooth + draw.normal(0, 0.05, steps.size)).tolist(),
        "grad_norm": draw.uniform(0.5, 1.5, steps.size).tolist(),
        "tokens_per_second": draw.normal(9000, 200, steps.size).tolist(),
        "validation_step": list(range(100, 601, 100)),
        "validation_loss": [float(floor + 0.05 + 0.03 * seed + 3.0 * math.exp(-s / 60)) for s in range(100, 601, 100)],
    }
    if attention == "diff":
        start = [0.8 - 0.6 * math.exp(-0.3 * i) for i in range(LAYERS)]
        drift = np.cumsum(draw.normal(0.0008, 0.004, (steps.size, LAYERS)), axis=0)
        curve["lambda_init"] = start
        curve["lambda"] = (np.array(start) + draw.normal(0, 0.05, LAYERS) + drift).tolist()
    return curve


def _evals(attention: str, seed: int, draw: np.random.Generator) -> list[dict]:
    ahead = attention == "diff"
    needle: dict[str, float] = {"chance": 0.011}
    for (n, r), base in {(1, 1): 0.97, (2, 2): 0.62, (4, 2): 0.4, (6, 2): 0.28}.items():
        by_depth = np.clip(base + 0.08 * ahead + draw.normal(0, 0.05, 5), 0, 1)
        needle |= {f"n{n}_r{r}_depth{d}": float(v) for d, v in zip((0, 25, 50, 75, 100), by_depth, strict=True)}
        needle[f"n{n}_r{r}"] = float(by_depth.mean())
    allocation: dict[str, float] = {}
    for part, base in {"answer": 0.2 if ahead else 0.08, "noise": 0.35 if ahead else 0.5}.items():
        values = base + draw.normal(0, 0.01, 5) + (np.linspace(0, 0.06, 5) if part == "answer" else 0)
        allocation |= {f"{part}_depth{d}": float(v) for d, v in zip((0, 25, 50, 75, 100), values, strict=True)}
        allocation[part] = float(values.mean())
    level = 3.91 + 0.03 * seed + (0 if ahead else 0.05)
    loss = {"validation": level, "ar_hit": 1.4 - 0.05 * ahead, "others": level + 0.3, "ar_hit_share": 0.121}
    loss["perplexity"] = math.exp(level)
    size = 24.0 if ahead else 17.0
    outliers = {}
    for kind, top in (("logits", size + seed), ("hidden", 3.1 * size)):
        shares = {"top1": 1, "top2": 0.95, "top3": 0.93, "top10": 0.8, "top100": 0.6, "median": 0.05}
        outliers |= {f"{kind}_{rank}": top * share for rank, share in shares.items()}
    recall = {"chance": 0.25, "accuracy": 0.95 - 0.4 * (not ahead), "accuracy_2x": 0.6, "answer": 0.2, "noise": 0.3}
    speed = {
        "train_tokens_per_second": 8900.0 + 300 * ahead + 90 * seed,
        "forward_tokens_per_second": 31000.0 - 900 * ahead,
    }
    rows = [
        {"needles": 1, "queries": 1, "depth": 0, "prompt": f"… {QUESTION}", "expected": "47", "got": "47", "score": 1.0}
    ]
    tables = {
        "needle": needle,
        "allocation": allocation,
        "associative_recall": loss,
        "outliers": outliers,
        "throughput": speed,
        "recall": recall,
    }
    return [
        {
            "eval": name,
            "model": f"{attention}-seed{seed}",
            "attention": attention,
            "seed": seed,
            "metrics": metrics,
            "rows": rows if name == "needle" else [],
            "provenance": {},
            "curves": {"recall": {"step": [0, 50, 100], "accuracy": [0.2, 0.3, 0.9]}} if name == "recall" else {},
        }
        for name, metrics in tables.items()
    ]


def _text() -> tuple[list[str], list[int]]:
    tail = [f" {w}" if not w.startswith("\n") else w for w in QUESTION.split(" ")]
    needle = [f" {w}" if not w.startswith("\n") else w for w in NEEDLE.split(" ")]
    words = PROSE.split()
    prose = [f" {words[i % len(words)]}" for i in range(LENGTH - len(tail) - len(needle))]
    tokens = [*prose[:30], *needle, *prose[30:], *tail]
    answer = tokens.index(" 47")
    return tokens, [answer, answer + 1]


def _explorer(attention: str, title: str, draw: np.random.Generator) -> dict:
    heads = DIFF_HEADS if attention == "diff" else SOFTMAX_HEADS
    tokens, span = _text()

    def maps(pull: float) -> np.ndarray:  # [L, H, T, T], causal, rows sum to 1
        logits = draw.normal(0, 1.6, (LAYERS, heads, LENGTH, LENGTH))
        logits[:, 1, -1, span[0]] += pull
        logits[:, :, :, 0] += 2.5
        logits[:, :, np.triu(np.ones((LENGTH, LENGTH), bool), 1)] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def packed(weights: np.ndarray) -> str:
        return base64.b64encode(np.round(255 * np.sqrt(weights)).astype(np.uint8).tobytes()).decode()

    entry: dict = {
        "attention": attention,
        "model": f"{attention}-seed0",
        "title": title,
        "tokens": tokens,
        "answer_span": span,
    }
    entry |= {"layers": LAYERS, "heads": heads, "answer": "47", "generated": "47", "first": packed(maps(6.0))}
    if attention == "diff":
        entry |= {"second": packed(maps(0.0)), "lambda": [0.24, 0.41, 0.52]}
    return entry


@pytest.fixture
def results() -> dict:
    """Two seeds, every section."""
    return make_results()


@pytest.fixture
def one_seed() -> dict:
    """One seed: no interval can be given."""
    return make_results(seeds=(3,))
