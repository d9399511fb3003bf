"""Lambda and attention maps of a trained layer, drawn: python examples/layer_maps.py

A tiny DIFF Transformer learns to repeat random tokens (half a minute on one core). Two maps of a head in its last layer
and their difference are written to layer_maps.svg: what both maps see cancels, the token to copy stays.
"""

from pathlib import Path
from typing import Any

import torch

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.presets import preset

HALF, STEPS, CELL = 12, 500, 9


def rows(count: int, seed: int) -> torch.Tensor:
    """``[count, 2 HALF]``: random tokens, and the same again."""
    half = torch.randint(1, 32, (count, HALF), generator=torch.Generator().manual_seed(seed))
    return torch.cat((half, half), 1)


def train() -> DiffTransformerForCausalLM:
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(preset("debug", vocab_size=32, hidden_size=64, head_norm_init=0.3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        ids = rows(64, step)
        loss = model(ids, labels=ids.masked_fill(torch.arange(2 * HALF) < HALF, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss on the repeated half: {loss.item():.3f} nats")
    return model.eval()


def svg(maps: dict[str, torch.Tensor]) -> str:
    """Each map ``[T, S]`` as squares: the darker, the larger the weight; negative weights are orange."""
    parts, size = [], CELL * 2 * HALF
    for place, (title, weights) in enumerate(maps.items()):
        parts.append(f'<g transform="translate({place * (size + 20)} 22)"><text y="-8" font-size="13">{title}</text>')
        parts.append(f'<path d="M0 0 V{size} H{size} Z" fill="#eee"/>')
        for t, s in (weights.abs() > 0.03).nonzero().tolist():
            weight = weights[t, s].item()
            color = "#1f5fbf" if weight >= 0 else "#d9730d"
            where = f'x="{CELL * s}" y="{CELL * t}" width="{CELL - 1}" height="{CELL - 1}"'
            parts.append(f'<rect {where} fill="{color}" fill-opacity="{min(1, abs(weight)):.2f}"/>')
        parts.append("</g>")
    box = f'viewBox="0 0 {len(maps) * (size + 20)} {size + 24}" font-family="sans-serif"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>\n'


def main(path: Path = Path("layer_maps.svg")) -> None:
    model, ids = train(), rows(1, 12345)
    with torch.no_grad():
        out = model.model(ids, output_hidden_states=True, use_cache=False)
        layer: Any = model.model.layers[-1]
        x = layer.input_layernorm(out.hidden_states[-2])
        tables = model.model.rotary_emb(x, position_ids=torch.arange(2 * HALF)[None])
        lam = layer.self_attn.lambdas(x)
        maps = layer.self_attn.attention_maps(x, position_embeddings=tables)
    places = torch.arange(HALF)
    copied = maps.difference[0, :, places + HALF - 1, places].mean(-1)  # weight of the token that comes next
    head = int(copied.argmax())
    print(f"lambda {lam:.3f}; head {head} gives the token to copy {copied[head]:.2f} of its weight")
    first, second, difference = (x[0, head] for x in maps)
    names = ("first map", "lambda times the second", "their difference")
    path.write_text(svg(dict(zip(names, (first, lam * second, difference), strict=True))))


if __name__ == "__main__":
    main()
