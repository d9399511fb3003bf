"""Figure 3 on one GPU: four sizes from 7M to 117M parameters, 33M tokens each, on text alone; one seed.

Commands: README.md. Hardware: one H100-class GPU. Time: a quarter of an hour at 25 % of 989 TFLOP/s; not measured.
With at least 150 MB of text, no text is repeated.
"""

from diff_transformer.lab.recipes.one_gpu import one_gpu
from diff_transformer.lab.stages import Stage

SIZES = ((256, 4), (512, 6), (768, 8), (1024, 8))  # width, layers; 16 maps each


def stages(corpus: str) -> list[Stage]:
    """``corpus``: a folder of text."""
    settings = {}
    for width, layers in SIZES:
        config = settings[f"width{width}"] = one_gpu()
        config.name = "ladder"
        config.model |= {"hidden_size": width, "num_hidden_layers": layers}
        config.data.corpus, config.data.mixture, config.data.loss = corpus, {"text": 1.0}, "tokens"
        config.train.steps, config.train.validate_every = 500, 50
    return [Stage(settings, {side: {"attention": side} for side in ("softmax", "diff")}, range(1), measure=())]
