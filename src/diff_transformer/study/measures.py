"""What is reported of a study's cells: the measures, and which way the paper says that they differ."""

from diff_transformer.study.analysis import Measure, Record, final_loss, metric


def recalls(record: Record) -> bool:
    """Whether a model's loss is lower where the context can be recalled, as the paper's models' is (.898, 3.272)."""
    found = record["metrics"].get("associative_recall", {})
    return found.get("ar_hit", 0.0) < found.get("others", 0.0)


AR_HIT = metric("associative_recall", "ar_hit", "lower", "loss on AR-Hit", tests=recalls)
OUTLIERS = (
    metric("outliers", "logits_top1", "lower", "largest attention logit"),
    metric("outliers", "logits_top1", "lower", "largest attention logit, in medians", over="logits_median"),
    metric("outliers", "hidden_top1", "lower", "largest hidden value"),
    metric("outliers", "hidden_top1", "lower", "largest hidden value, in medians", over="hidden_median"),
)
MEASURES = [
    final_loss(),
    AR_HIT,
    metric("associative_recall", "others", "lower", "loss on Others"),
    metric("needle", "n1_r1", "higher", "1 needle"),
    metric("needle", "n2_r1", "higher", "2 needles, 1 asked for"),
    metric("needle", "n4_r1", "higher", "4 needles, 1 asked for"),
    metric("needle", "n4_r2", "higher", "4 needles, 2 asked for"),
    metric("long_nll", "nll128", "lower", "loss over 128 tokens (the length trained at)"),
    metric("long_nll", "nll512", "", "loss over 512 tokens (extrapolation)"),
    metric("allocation", "answer", "higher", "attention on the answer"),
    metric("allocation", "noise", "lower", "attention on the noise"),
    *OUTLIERS,
    metric("quantization", "loss_4bit_change", "lower", "loss that 4-bit logits cost"),
    metric("many_shot", "random_mean", "higher", "many-shot accuracy (chance .06)"),
    metric("many_shot", "random_margin", "lower", "many-shot best less worst order"),
    Measure("median gradient norm", lambda record: record["gradients"]["median"]),
    Measure("largest gradient norm after the first tenth", lambda record: record["gradients"]["largest"]),
    Measure("gradient spikes", lambda record: record["gradients"]["spikes"]),
]
