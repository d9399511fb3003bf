"""Rows of a comparison that never ran, with realistic columns, drawn from fixed seeds."""

import base64

import numpy as np

from diff_transformer.lab.rows import row

LOSS = {"diff": 3.7, "softmax": 4.0, "softmax_norm": 3.69}
CONFIG = {
    "name": "demo",
    "train": {"steps": 100, "batch_size": 16},
    "data": {"length": 128, "corpus": "python"},
    "optim": {"lr": 5e-4},
}


def comparison(sides=("diff", "softmax", "softmax_norm"), seeds=(0,), setting="demo", examples=40, explorer=True):
    """A list of rows: each side with each training seed."""
    made = []
    for seed in seeds:
        for side in sides:
            made += model(side, seed, setting, examples)
    if explorer:
        made += [attention(side, setting) for side in sides]
    made.append(row("about", "", of="comparison", example="command", key="command", value="diff-transformer compare"))
    return made


def model(side, seed=0, setting="demo", examples=40):
    draw = np.random.default_rng([seed, len(side)])
    key = (side, seed, setting)
    base = LOSS.get(side, 4.0) + 0.01 * seed
    of_example = np.random.default_rng(7).normal(0, 0.3, examples)
    made = []
    for i in range(examples):
        loss = base + of_example[i] + draw.normal(0, 0.02)
        made.append(row("associative_recall", *key, example=i, loss=loss, ar_hit_sum=10 * (loss + 1), ar_hit_count=10,
                        others_sum=100 * loss, others_count=100))  # fmt: skip
        text = {"prompt": "Where <b>is</b> it?", "expected": " 5.", "got": " 5." if i % 2 else " 6."}
        made.append(
            row("needle", *key, example=i, n=1, r=1, length=128, depth=(i % 5) / 4, score=float(i % 10 > 0), **text)
        )
        made.append(
            row("needle", *key, example=examples + i, n=2, r=1, length=128, depth=(i % 5) / 4, score=float(i % 2))
        )
        made.append(row("allocation", *key, example=i, depth=(i % 5) / 4, answer=0.3 + draw.normal(0, 0.01), noise=0.4))
        made.append(
            row(
                "outliers",
                *key,
                example=i,
                logits_top1=10 + i,
                logits_median=1.0,
                hidden_top1=5.0 + i,
                hidden_median=0.5,
            )
        )
        made.append(row("recall", *key, example=i, length=56, hits=12 if side == "diff" else 6, questions=16))
        for bits in (16, 4):
            made.append(row("quantization", *key, example=i, bits=bits, loss=loss + 0.1 / bits))
        for end in (1, 64, 128):
            made.append(row("long_nll", *key, example=f"book {i}", end=end, sum=loss * end, count=end))
    for step in range(0, 101, 10):
        made.append(
            row("training", *key, example=step, step=step, loss=8 - step / 25, grad_norm=1.0, tokens_per_second=9.0)
        )
        made.append(row("validation", *key, example=step, step=step, loss=base + 4 - step / 25))
        made.append(row("recall_curve", *key, example=step, step=step, accuracy=min(1.0, step / 50)))
        if side == "diff":
            made += [row("lambda", *key, example=step, step=step, layer=k, value=0.2 + step / 500) for k in (0, 1)]
    for kind in ("logits", "hidden"):
        for k in (0, 1, 10):
            made.append(row("outliers_top", *key, example=f"{kind}{k}", kind=kind, layer=-1, k=k, value=20.0 / (k + 1)))
    for i in range(7 if seed == 0 else 0):  # speed is measured once
        made.append(
            row("throughput", *key, example=i, train_tokens_per_second=1000.0 + i, forward_tokens_per_second=3000.0)
        )
    made.append(row("gradients", *key, median=1.0, largest=3.0, spikes=0))
    made.append(
        row("model", *key, parameters=640_000, flops_per_token=4e6, kv_bytes_per_token=1024, intermediate_size=300)
    )
    made.append(row("about", *key, of="run", example="config", key="config", value=CONFIG))
    for name, value in (("cpu", "Example CPU"), ("device", "cpu"), ("threads", 2)):
        made.append(row("about", *key, of="training", example=name, key=name, value=value))
    for name in ("needle", "associative_recall"):
        made.append(row("about", *key, of=name, example="length", key="length", value=128))
    return made


def attention(side, setting="demo", tokens=6, layers=2, heads=2):
    maps = base64.b64encode(bytes([100]) * (layers * heads * tokens * (tokens + 1) // 2)).decode()
    entry = {
        "title": "One needle", "tokens": [f" t{i}" for i in range(tokens)], "span": [1, 3], "layers": layers,
        "heads": heads, "first": maps, "lambda": [0.2, 0.3], "answer": " 5.", "generated": " 5. more",
    } | ({"second": maps} if side == "diff" else {})  # fmt: skip
    return row("explorer", side, 0, setting, entry=entry)
