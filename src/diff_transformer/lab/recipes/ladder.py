"""Figure 3 on one GPU: the pair at four sizes, equal tokens."""

from diff_transformer.lab.recipes.one_gpu import one_gpu
from diff_transformer.lab.spec import Choices, RunSpec, Study, seeds

SIZES = ((256, 4), (512, 6), (768, 8), (1024, 8))  # width, layers; 16 maps each


def ladder_study(corpus: str) -> Study:
    """Four sizes from 7M to 117M parameters, 33M tokens each, on text alone; one seed.

    Command: ``diff-transformer study ladder --corpus FOLDER --out runs/ladder --jobs 1``, then ``diff-transformer eval
    scaling --set runs=runs/ladder --out runs/ladder.json``. Hardware: one H100-class GPU. Time: a quarter of an hour,
    at 25 % of 989 TFLOP/s; not measured. Give it 150 MB of text or more, to see none of it twice.
    """

    def runs(_: Choices) -> list[RunSpec]:
        made = []
        for width, layers in SIZES:
            for attention in ("softmax", "diff"):
                config = one_gpu()
                config.name = "ladder"
                config.model |= {"hidden_size": width, "num_hidden_layers": layers, "attention": attention}
                config.data.corpus, config.data.mixture, config.data.loss = corpus, {"text": 1.0}, "tokens"
                config.train.steps, config.train.validate_every = 500, 50
                made += seeds(f"width{width}", attention, config, range(1), measured=False)
        return made

    return Study("ladder", [], runs)
