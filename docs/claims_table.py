"""The table of docs/reproduction.md: each claim, what the paper ran, what it takes, what the desk study saw."""

import json
from dataclasses import dataclass
from pathlib import Path

from diff_transformer.lab.measures import paired_rows
from diff_transformer.lab.quantities import quantities
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.record import grouped, load_all
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.cost import BF16_PEAK_FLOPS, training_seconds

RECORD = Path(__file__).resolve().parents[1] / "figures" / "desk" / "measured.json"
BENCHMARKS = RECORD.parents[2] / "benchmarks" / "results"
MAIN, SIDE = "novels", "diff_same_rate"  # of the desk study: its main setting, one learning rate for both models


@dataclass(frozen=True)
class Claim:
    """``trained``: recipe -> how many models of its size and tokens have to be trained; ``saw``: quantities of
    the desk study by id, or a sentence where that has none; ``more``: links."""

    claim: str
    paper: str
    command: str
    trained: dict[str, int]
    saw: tuple[str, ...] | str
    more: str


def folder(*names: str) -> str:
    return ", ".join(f"[{name.replace('_', ' ')}](../figures/{name}/README.md)" for name in names)


def pair(*recipes: str) -> dict[str, int]:
    return dict.fromkeys(recipes, 2)


def speeds() -> str:
    """DIFF's share of the Transformer's tokens/s, forward + backward, on a CPU and a GPU."""
    said = []
    for device, where in (("cpu", "two CPU cores"), ("gpu", "an H200")):
        rows = json.loads((BENCHMARKS / f"throughput_{device}.json").read_text())["rows"]
        ratios = [row["forward_backward_ratio"] for row in rows if row["side"] == "diff"]
        said.append(f"{min(ratios):.2f} to {max(ratios):.2f} of the Transformer's speed on {where}")
    return "; ".join(said)


SIZES = pair("scaling_830m", "scaling_1p4b", "scaling_2p8b", "scaling_6p8b", "scaling_13b")
ONE_PAIR = "one pair, one seed: nothing to be told from it"
ROWS = (
    Claim("Lower loss at equal size and tokens (Figure 3a)", "830M to 13.1B, 10B tokens each",
        "`train --recipe scaling_830m` and so on, each also with `_baseline`; `eval scaling` on the table of runs; at "
        "7M to 117M on one GPU `study ladder`", SIZES, ("validation_loss",), folder("figure3_scaling")),
    Claim("Equal loss with 64 % of the tokens (Figure 3b)", "3B, 360B tokens", "`train --recipe paper_3b`",
        pair("paper_3b"), "the column \"tokens to its loss\"", "[desk](../figures/desk/README.md)"),
    Claim("Zero- and five-shot tasks (Tables 1 and 8)", "3B, 1T tokens", "`eval harness` on what `paper_3b` trained",
        pair("paper_3b"), ONE_PAIR, folder("table1_harness", "table8_five_shot")),
    Claim("A longer context goes on helping (Figure 4)", "3B continued to 64K",
        "`train --recipe long_context_64k`, `eval long_nll`", pair("paper_3b", "long_context_64k"),
        ("nll128", "nll512"), folder("figure4_long_nll")),
    Claim("Several needles in 4K (Table 2), eight in 64K (Figure 5)", "3B", "`eval needle`",
        pair("paper_3b", "long_context_64k"),
        ("needle_n1_r1", "needle_n4_r2"), folder("table2_needle", "figure5_needle_64k")),
    Claim("Attention goes to the answer (Table 3, Figure 1)", "3B", "`eval allocation`", pair("paper_3b"),
        ("answer", "noise"), folder("table3_allocation")),
    Claim("Many-shot learning and its robustness to order (Figures 6, 7, 9)", "3B at 64K, four sets",
        "`eval many_shot --data hub:trec` and others", pair("paper_3b", "long_context_64k"),
        "one constant answer in both models: nothing measured",
        folder("figure6_many_shot", "figure7_order", "figure9_order")),
    Claim("Fewer contextual hallucinations (Table 4)", "3B, six sets, a judge model",
        "`eval hallucination` with an endpoint", pair("paper_3b"), ONE_PAIR, folder("table4_hallucination")),
    Claim("Smaller outliers (Table 5)", "3B, 0.4M tokens", "`eval outliers`", pair("paper_3b"),
        ("logits", "logits_in_medians", "hidden", "hidden_in_medians"), folder("table5_outliers")),
    Claim("Attention logits of fewer bits (Figure 8)", "3B, HellaSwag",
        "`eval quantization --data hub:Rowan/hellaswag`", pair("paper_3b"), ("four_bits",),
        folder("figure8_quantization")),
    Claim("Which part does it (Table 6)", "1.4B, seven rows", "`train --recipe ablation_1p4b` and its rows",
        {"scaling_1p4b": 7}, ("ar_hit", "others"),
        folder("table6_ablation", "table6_associative_recall")),
    Claim("Throughput (Table 7)", "3B and 13B on H100s", "`bench throughput --device cuda`", {},
        speeds(), "[performance](performance.md)"),
    Claim("Gradients of the same size (appendix F)", "in closed form", "`eval gradient_flow`", {}, ONE_PAIR,
        folder("appendix_f_gradient_flow")),
)  # fmt: skip


def claims_table() -> str:
    cells = grouped(load_all(RECORD))
    heads = ("claim", "the paper ran", "command at its scale", "H100 days", "the desk study saw", "more")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in ROWS:
        saw = row.saw if isinstance(row.saw, str) else "; ".join(_differences(cells, row.saw))
        lines.append(f"| {row.claim} | {row.paper} | {row.command} | {_days(row.trained)} | {saw} | {row.more} |")
    return "\n".join(lines)


def _differences(cells, ids) -> list[str]:
    marks = {"held": "✓ ", "did not hold": "✗ "}
    said = []
    for row in paired_rows(cells, MAIN, SIDE, quantities(*ids)):
        mean, low, high, _ = row.difference
        said.append(f"{marks.get(row.verdict, '')}{row.measure} {mean:+.3f} ({low:+.3f} to {high:+.3f})")
    return said


def _days(trained: dict[str, int]) -> str:
    """Days on one H100 at the cost model's 40 % of its peak."""
    seconds = 0.0
    for name, models in trained.items():
        run = recipe(name)
        seconds += models * training_seconds(
            DiffTransformerConfig(**run.model),
            tokens=run.train.steps * run.train.batch_size * run.data.length,
            length=run.data.length,
            peak_flops=BF16_PEAK_FLOPS["H100"],
        )
    return f"{seconds / 86_400:,.0f}" if trained else "minutes"
