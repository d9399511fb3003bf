"""What is reported of a study's cells: the measures, and which way the paper says that they differ."""

from diff_transformer.study.analysis import Measure, final_loss, metric

MEASURES = [
    final_loss(),
    metric("associative_recall", "ar_hit", "lower", "loss on AR-Hit"),
    metric("associative_recall", "others", "lower", "loss on Others"),
    metric("needle", "n1_r1", "higher", "1 needle"),
    metric("needle", "n2_r1", "higher", "2 needles, 1 asked for"),
    metric("needle", "n4_r1", "higher", "4 needles, 1 asked for"),
    metric("needle", "n4_r2", "higher", "4 needles, 2 asked for"),
    metric("long_nll", "nll128", "", "loss over 128 tokens (the length trained at)"),
    metric("long_nll", "nll512", "lower", "loss over 512 tokens"),
    metric("allocation", "answer", "higher", "attention on the answer"),
    metric("allocation", "noise", "lower", "attention on the noise"),
    metric("outliers", "logits_top1", "lower", "largest attention logit"),
    metric("outliers", "hidden_top1", "lower", "largest hidden value"),
    metric("quantization", "loss_4bit_change", "lower", "loss that 4-bit logits cost"),
    metric("many_shot", "random_mean", "higher", "many-shot accuracy (chance .06)"),
    metric("many_shot", "random_margin", "lower", "many-shot best less worst order"),
    Measure("median gradient norm", lambda record: record["gradients"]["median"]),
    Measure("largest gradient norm after the first tenth", lambda record: record["gradients"]["largest"]),
    Measure("gradient spikes", lambda record: record["gradients"]["spikes"]),
]
