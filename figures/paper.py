"""What belongs to each table and figure of the paper: its experiment, its measures and the panels of its plot."""

from dataclasses import dataclass

from diff_transformer.lab.quantities import Quantity, quantities

DEPTHS = (0, 25, 50, 75, 100)
TOPS = ("top1", "top2", "top3", "top10", "top100", "median")
BITS = (16, 8, 6, 4)


@dataclass(frozen=True)
class Panel:
    """A panel of bars or, with ``line``, of lines: one group for each of ``ticks``, label -> name of the number (or a
    pattern of names whose group is the label).

    Names are metrics of the folder's experiment or, where ``paper`` is given, keys of that entry of ``expected.json``
    under "Transformer" and "DIFF".
    """

    title: str
    ticks: dict[str, str] | str
    label: str
    paper: str = ""
    line: bool = False
    log: bool = False
    level: str = ""  # the metric of a level to draw, such as chance


@dataclass(frozen=True)
class Folder:
    """``shown``: a pattern of the metrics in the table of the demo's checkpoints; ``measures``: rows from the desk
    study; ``panels``: the plot, its first ones from the desk study where that has the experiment."""

    experiment: str
    shown: str
    panels: tuple[Panel, ...] = ()
    measures: tuple[Quantity, ...] = ()


def _depths(kind: str) -> dict[str, str]:
    return {f"{depth} %": f"{kind}_depth{depth}" for depth in DEPTHS}


def margins(title: str) -> tuple[Panel, ...]:
    ticks = {"random": "random_mean", "by class": "alternate_mean"}
    return (
        Panel(f"ours: accuracy, {title}", ticks, "share right", level="chance"),
        Panel(
            "ours: best order less worst", {"random": "random_margin", "by class": "alternate_margin"}, "share of right"
        ),
    )


_ORDER = quantities("many_shot", "order_random", "order_alternate")
_TASKS = {"ARC-C": "arc_challenge", "ARC-E": "arc_easy", "BoolQ": "boolq", "Hella-\nSwag": "hellaswag",
          "OBQA": "openbookqa", "PIQA": "piqa", "Wino-\nGrande": "winogrande", "mean": "mean"}  # fmt: skip
_SETS = {"XSum": "xsum", "CNN": "cnn_dailymail", "Multi-\nNews": "multi_news", "Qasper": "qasper",
         "Hotpot": "hotpotqa", "2Wiki": "2wikimultihopqa"}  # fmt: skip


def _harness(shots: int) -> tuple[Panel, ...]:
    names = {"names": f"python_names_{shots}shot", "descriptions": f"python_descriptions_{shots}shot"}
    return (Panel(f"ours, {shots}-shot (four choices)", names, "share right"),)


FOLDERS: dict[str, Folder] = {
    "table1_harness": Folder(
        "harness",
        r"(.+_0shot|mean_0shot)(?<!_acc)(?<!_acc_norm)(?<!_truncated)",
        (*_harness(0), Panel("paper, 3B, zero-shot", _TASKS, "per cent right", paper="models")),
    ),
    "table8_five_shot": Folder(
        "harness", r"(.+_5shot|mean_5shot)(?<!_acc)(?<!_acc_norm)(?<!_truncated)", _harness(5)
    ),
    "figure3_scaling": Folder("scaling", r".*ratio.*", (), quantities("validation_loss")),
    "figure4_long_nll": Folder(
        "long_nll",
        r"nll\d+",
        (
            Panel("ours: mean over the first tokens of a book", {str(2**i): f"nll{2**i}" for i in range(4, 10)},
                  "nats a token", line=True),
        ),
        quantities("nll128", "nll256", "nll512"),
    ),
    "table2_needle": Folder(
        "needle",
        r"n\d+_r\d+|n\d+_r\d+_depth\d+|chance",
        (
            Panel("ours, 128 tokens", {"1 of 1": "n1_r1", "1 of 2": "n2_r1", "1 of 4": "n4_r1", "2 of 4": "n4_r2"},
                  "share found", level="chance"),
            Panel("paper, 3B, 4096 tokens", {f"{r} of {n}": f"n{n}_r{r}" for n, r in ((1, 1), (2, 2), (4, 2), (6, 2))},
                  "share found", paper="accuracy"),
        ),
        quantities("needle_n1_r1", "needle_n2_r1", "needle_n4_r1", "needle_n4_r2"),
    ),
    "figure5_needle_64k": Folder(
        "needle",
        r"n\d+_r\d+_len\d+.*",
        (Panel("ours: one needle by length (trained at 128)",
               {str(n): f"n1_r1_len{n}" for n in (96, 128, 192, 256)}, "share found", line=True, level="chance"),),
    ),
    "table3_allocation": Folder(
        "allocation",
        r"(answer|noise)(_depth\d+)?",
        (
            Panel("ours: on the answer", _depths("answer"), "share of attention", line=True),
            Panel("ours: on the noise", _depths("noise"), "share of attention", line=True),
            Panel("paper: on the answer", {f"{d} %": str(d) for d in DEPTHS}, "share of attention", "answer", True),
            Panel("paper: on the noise", {f"{d} %": str(d) for d in DEPTHS}, "share of attention", "noise", True),
        ),
        quantities("answer", "noise", "best_head_answer"),
    ),
    "figure6_many_shot": Folder(
        "many_shot",
        r"shots\d+|tokens\d+|chance",
        (Panel("ours: accuracy by number of examples", r"shots(\d+)", "share right", line=True, level="chance"),),
        quantities("many_shot"),
    ),
    "figure7_order": Folder(
        "many_shot",
        r"(random|alternate)_(mean|best|worst|margin)|chance",
        (*margins("modules of Python"),
         Panel("paper, TREC: best less worst", {"random": "random", "by class": "alternate"}, "points", "margin")),
        _ORDER,
    ),
    "figure9_order": Folder(
        "many_shot", r"(random|alternate)_(mean|margin)|chance", margins("modules of Python"), _ORDER
    ),
    "table4_hallucination": Folder(
        "hallucination",
        r"(?!.*_(stderr|undecided|empty|truncated)$).+",
        (
            Panel("ours, judged by containment", {"summaries": "python_summaries", "lookups": "python_lookups"},
                  "share free of it"),
            Panel("paper, 3B, judged by a model", _SETS, "share free of it", paper="models"),
        ),
    ),
    "table5_outliers": Folder(
        "outliers",
        r"(logits|hidden)_(top\d+|median)",
        tuple(
            Panel(f"{who}: {what}", {tick: f"{prefix}{tick}" for tick in TOPS}, "magnitude", paper=paper, log=True)
            for who, kind in (("ours", ""), ("paper", "paper"))
            for name, what in (("logits", "attention logits"), ("hidden", "hidden states"))
            for prefix, paper in [("", name) if kind else (f"{name}_", "")]
        ),
        quantities("logits", "logits_in_medians", "hidden", "hidden_in_medians"),
    ),
    "figure8_quantization": Folder(
        "quantization",
        r"(accuracy|loss)_\d+bit|chance",
        (
            Panel("ours: loss of held-out text", {f"{b}": f"loss_{b}bit" for b in BITS}, "nats a token", line=True),
            Panel("ours: accuracy, four choices", {f"{b}": f"accuracy_{b}bit" for b in BITS}, "share right",
                  line=True, level="chance"),
        ),
        quantities("six_bits", "four_bits", "accuracy_4bit"),
    ),
    "table6_associative_recall": Folder(
        "associative_recall",
        r"validation|ar_hit|others|ar_hit_share",
        (Panel("ours", {"all": "validation", "AR-Hit": "ar_hit", "Others": "others"}, "nats a token"),),
        quantities("loss", "ar_hit", "others"),
    ),
    "table6_ablation": Folder("ablation", r".+_(validation|ar_hit|others)"),
    "appendix_f_gradient_flow": Folder(
        "gradient_flow",
        r"(model|init_diff|init_softmax)_(q1|q2|k1|k2|q|k|v|o)|error_w_.*",
        (Panel("after training", {name: f"model_{name}" for name in "qkvo"}, "RMS of the gradient"),),
    ),
}  # fmt: skip

# Table 6: a side of the desk study -> its name, and its row in expected.json.
ABLATED = {
    "softmax_wide": ("Transformer, half the heads, twice as wide", "transformer_wide"),
    "softmax_wide_norm": ("Transformer, half the heads, with a head norm", "transformer_wide_norm"),
    "diff_same_rate": ("DIFF", "diff"),
    "diff_no_norm": ("DIFF without head norm", "diff_no_norm"),
    "diff_lambda_0.8": ("DIFF, lambda_init .8", "diff_lambda_0.8"),
    "diff_lambda_0.5": ("DIFF, lambda_init .5", "diff_lambda_0.5"),
}
TABLE_6 = quantities("loss", "ar_hit", "others")
