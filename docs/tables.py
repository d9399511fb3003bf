"""Fill the tables of docs/pretraining.md, from the cost model, and docs/reproduction.md.

python docs/tables.py          # fill
python docs/tables.py --check  # exit 1 if a page differs
"""

import re
import sys
from pathlib import Path

from claims_table import claims_table

from diff_transformer.model.cost import model_cost
from diff_transformer.model.training_cost import BF16_PEAK_FLOPS, training_memory, training_seconds
from diff_transformer.recipes import recipe

DOCS = Path(__file__).resolve().parent
RECIPES = (
    "scaling_830m",
    "scaling_1p4b",
    "scaling_2p8b",
    "paper_3b",
    "scaling_6p8b",
    "scaling_13b",
    "long_context_64k",
)
GPUS = (1, 8, 16, 64, 256)
LOSS_CHUNK = 4096


def memory() -> str:
    """GiB on each GPU for one row a GPU, and days for the recipe's tokens."""
    lines = ["| recipe | parameters | tokens | " + " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in GPUS) + " |"]
    lines.append("|---" * (len(GPUS) + 3) + "|")
    for name in RECIPES:
        run = recipe(name)
        config = _config(run)
        tokens = run.train.steps * run.train.batch_size * run.data.length
        cells = []
        for devices in GPUS:
            used = training_memory(
                config,
                tokens=run.data.length,
                devices=devices,
                activation_checkpointing=True,
                loss_chunk=LOSS_CHUNK,
            )
            seconds = training_seconds(
                config,
                tokens=tokens,
                length=run.data.length,
                devices=devices,
                peak_flops=BF16_PEAK_FLOPS["H100"],
            )
            cells.append(f"{used.gib:.0f} GiB, {_days(seconds)}" if used.gib < 76 else f"{used.gib:.0f} GiB: too much")
        size = model_cost(config).total_parameters
        lines.append(f"| `{name}` | {size / 1e9:.2f}B | {tokens / 1e9:,.1f}B | {' | '.join(cells)} |")
    return "\n".join(lines)


def _config(run):
    from diff_transformer.model.config import DiffTransformerConfig

    return DiffTransformerConfig(**run.model)


def _days(seconds: float) -> str:
    days = seconds / 86_400
    return f"{days:,.0f} days" if days >= 10 else f"{days:.1f} days" if days >= 1 else f"{24 * days:.1f} hours"


TABLES = {DOCS / "pretraining.md": ("memory", memory), DOCS / "reproduction.md": ("claims", claims_table)}


def filled(page: Path) -> str:
    name, table = TABLES[page]
    made = table()
    pattern = rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- /{name} -->)"
    return re.sub(pattern, lambda _: made, page.read_text(), flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    stale = {page: text for page in TABLES if (text := filled(page)) != page.read_text()}
    if arguments == ["--check"]:
        print("\n".join(f"{page.name} differs" for page in stale))
        return bool(stale)
    for page, text in stale.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
