"""The study at 33M parameters: its runs are those of the preregistration, and it runs from end to end in small."""

import pytest
from scale.plan import MATCHED, OWN_SCALE, RATES, SIDES, base

from diff_transformer import DiffTransformerConfig
from diff_transformer.data.prepare import PrepareConfig, prepare
from diff_transformer.lab.stages import load_stages
from diff_transformer.lab.worker import run
from diff_transformer.model.cost import count_parameters
from diff_transformer.model.head_scale import with_matched_scale
from diff_transformer.model.lambdas import lambda_init


def test_the_runs_are_those_that_were_planned():
    main, twice = load_stages("scale")
    assert [len(stage.identities()) for stage in (main, twice)] == [15, 5]
    for spec in main.specs({}):
        model = DiffTransformerConfig(**spec.config.model)
        assert sum(count_parameters(model).values()) == pytest.approx(33.3e6, rel=0.01)
        assert spec.config.train.steps * spec.config.train.batch_size * spec.config.data.length == 32_768_000
        assert spec.config.optim.lr == RATES[spec.side]
    assert [spec.config.optim.lr for spec in twice.specs({})] == [2 * RATES[side] for side in SIDES]


@pytest.mark.slow
def test_the_scales_are_those_of_the_untrained_transformer():
    """The mean over two initialisations, rounded."""
    config = DiffTransformerConfig(**base("python").model | {"head_norm_init": 1.0})
    both = [with_matched_scale(config, length=1024, seed=seed, draws=1).head_norm_init for seed in (0, 1)]
    measured = [sum(sizes) / 2 for sizes in zip(*both, strict=True)]
    assert measured == pytest.approx(MATCHED, abs=0.01)
    starts = [1 - lambda_init(layer, config.lambda_depth_offset) for layer in range(8)]
    assert [size * start for size, start in zip(measured, starts, strict=True)] == pytest.approx(OWN_SCALE, abs=0.01)


@pytest.mark.slow
def test_a_run_from_end_to_end_on_a_prepared_folder(texts, tmp_path):
    prepare(PrepareConfig((str(texts),), vocab_size=512, validation=0.3), tmp_path / "books")
    small = ["train.steps=2", "train.batch_size=6", "train.compile=false", "train.precision=32-true",
             "model.vocab_size=512", "model.hidden_size=64", "model.num_attention_heads=2", "data.length=320",
             "evaluation.samples=1", "evaluation.loss_rows=4", "evaluation.outlier_rows=4",
             'evaluation.more={"long_nll": {"length": 256, "samples": 2}}', "optim.warmup_steps=1"]  # fmt: skip
    main, _ = load_stages("scale", str(tmp_path / "books"), small)
    spec = main.specs({})[1]
    spec.save(tmp_path / "run")
    record = run(tmp_path / "run")
    assert {"associative_recall", "needle", "allocation", "outliers", "long_nll"} <= {*record.rows.experiments}
