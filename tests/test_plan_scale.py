"""The study at 33M parameters: its runs are those of the preregistration, and it runs from end to end in small."""

import pytest
from scale.plan import MATCHED, OWN_SCALE, RATES, SIDES, base
from scale.run import differences

from diff_transformer import DiffTransformerConfig
from diff_transformer.data.prepare import PrepareConfig, prepare
from diff_transformer.lab.record import Record, grouped
from diff_transformer.lab.stages import load_stages
from diff_transformer.lab.worker import run
from diff_transformer.model.cost import count_parameters
from diff_transformer.model.head_norm_init import matched_head_norm_init
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


def test_the_table_pairs_the_seeds_that_are_whole():
    def record(side, seed):
        loss = 4.0 + 0.1 * seed - 0.5 * (side == "diff_matched")
        metrics = {
            "associative_recall": {"validation": loss, "ar_hit": 1.0}, "needle": {"n4_r2": 0.5, "n6_r2": 0.25},
            "allocation": {"answer": 0.1, "noise": 0.2}, "long_nll": {"nll4096": 4.0},
            "outliers": {"logits_top1": 10.0, "hidden_top1": 100.0},
        }  # fmt: skip
        return Record("books", side, seed, metrics=metrics)

    cells = grouped([record(side, seed) for side in SIDES for seed in (0, 1, 2) if (side, seed) != ("softmax", 2)])
    shown = differences(cells)
    assert shown.startswith("| `books`: 2 seeds, paired; 95 % CI; each seed | Transformer | DIFF as published |")
    assert "| held-out loss | 4.050 | 4.050 | 3.550 | 4.050 | 4.050 |" in shown
    assert "| -0.500 (-0.500 to -0.500); -0.500, -0.500 |  |" in shown
    assert "| accuracy: 2 of 4 and 2 of 6 needles | 0.375 |" in shown
    cells["books"]["diff_v2"][1] = Record("books", "diff_v2", 1, diverged="step 9: loss nan")
    shown = differences(cells)
    assert shown.startswith("Diverged: DIFF V2, seed 1.\n\n| `books`: one run of each side | Transformer |")
    assert "| held-out loss | 4.000 | 4.000 | 3.500 |" in shown
    assert "(" not in shown.split("| held-out loss")[1].split("| accuracy")[0]  # no interval


@pytest.mark.slow
def test_the_scales_are_those_of_the_untrained_transformer():
    """The mean over two initialisations, rounded."""
    config = DiffTransformerConfig(**base("python").model | {"head_norm_init": 1.0})
    both = [matched_head_norm_init(config, length=1024, seed=seed) for seed in (0, 1)]
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
    assert {"associative_recall", "needle", "allocation", "outliers", "long_nll"} <= record.metrics.keys()
