"""``compare --from``: a pretrained Transformer, what it converts to and a control go on from the same logits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, Qwen3Config

from diff_transformer.data.needles import needle_texts
from diff_transformer.data.tokenizer import train_tokenizer
from diff_transformer.errors import UserError
from diff_transformer.lab.compare import compare
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.record import records_of
from diff_transformer.lab.results import read_comparison
from diff_transformer.lab.rows import finished
from diff_transformer.lab.uptrain import read_source
from diff_transformer.lab.worker import run
from diff_transformer.model.card import label_of
from diff_transformer.model.convert.folder import convert_folder
from diff_transformer.model.differentiate import LAMBDA
from diff_transformer.train.config import override
from diff_transformer.train.plan import resolve

SIZES = {
    "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
ODD = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}  # of SmolLM2-135M, which form no pairs
ARMS = ("diff", "softmax", "diff_v2", "wider")
MINE = Path(__file__).parents[2] / "examples" / "my_experiment.py"


@pytest.fixture(scope="module")
def make(texts, tmp_path_factory):
    """``make(config class)``: the folder of a tiny random model with a tokenizer of its own."""
    tokenizer, made = train_tokenizer([*needle_texts(200), *(path.read_text() for path in texts.iterdir())], 400), {}

    def build(kind):
        if kind not in made:
            torch.manual_seed(0)
            made[kind] = tmp_path_factory.mktemp("source") / "model"
            config = kind(vocab_size=len(tokenizer), **SIZES | (ODD if kind is LlamaConfig else {}))
            AutoModelForCausalLM.from_config(config).save_pretrained(made[kind])
            tokenizer.save_pretrained(made[kind])
        return made[kind]

    return build


@pytest.fixture
def settings(texts):
    """A comparison of three steps."""
    return override(
        recipe("uptrain"),
        [
            f"data.corpus={texts}", "data.length=96", "data.needles.digits=1", "train.steps=3", "train.batch_size=2",
            "train.log_every=1", "optim.warmup_steps=1", "train.validation_rows=4",
            "evaluation.needles=[[1,1]]", "evaluation.samples=1",
            "evaluation.allocation_samples=1", "evaluation.loss_rows=2", "evaluation.outlier_rows=2",
            "evaluation.throughput_repeats=1",
            f'evaluation.more={{"long_nll":{{"samples":2}},"gradient_flow":{{"samples":1}},"{MINE}":{{"samples":2}}}}',
        ],
    )  # fmt: skip


@pytest.fixture
def here(monkeypatch):
    """Runs are trained and measured in this process. Returns whether each only trains, in their order."""
    only_training = []

    def pool(runs, **options):
        for folder, spec in runs.items():
            if not finished(folder):
                spec.save(folder)
                only_training.append(spec.measure is None)
                run(folder)
                assert finished(folder) != only_training[-1]

    monkeypatch.setattr("diff_transformer.lab.compare.run_pool", pool)
    return only_training


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_every_arm_starts_with_the_logits_of_the_source_and_sees_the_same_rows(make, settings, here, tmp_path):
    source, out = make(LlamaConfig), tmp_path / "out"
    before = content(source)
    verdicts = compare(settings, out, source=source, jobs=1)
    assert content(source) == before
    ids = torch.randint(0, 400, (2, 20))
    starts = {side: loaded(out / "initial" / side) for side in ARMS}
    with torch.no_grad():
        wanted = loaded(source)(ids).logits
        for start in starts.values():
            torch.testing.assert_close(start(ids).logits, wanted, atol=1e-5, rtol=1e-5)
    sizes = {side: start.num_parameters() for side, start in starts.items()}
    assert sizes["softmax"] < sizes["diff_v2"] < sizes["wider"] <= sizes["diff"] <= sizes["wider"] + 4 * 8
    members = [out / "members" / f"{side}-seed0" for side in ARMS]
    first = [json.loads((member / "run" / "metrics.jsonl").read_text().splitlines()[0]) for member in members]
    assert {line["rows"] for line in first} == {first[0]["rows"]}
    assert [line["validation_loss"] for line in first] == pytest.approx([first[1]["validation_loss"]] * 4, abs=1e-5)
    records = {record.side: record for record in records_of(read_comparison(out))}
    assert {*records} == {*ARMS, "source"}
    assert here == [True] * 4 + [False] * 5  # all train before any is measured
    assert {"long_nll", "gradient_flow", "my_experiment"} <= {*records["source"].rows.experiments}
    assert not (out / "members" / "source-seed0" / "run").exists()
    assert {other for of in verdicts.values() for other in of} == {"softmax", "wider"}
    for side, values in (("softmax", verdicts["loss"]["softmax"]), ("wider", verdicts["loss"]["wider"])):
        assert values.other_by_seed == {0: pytest.approx(records[side].metrics["loss"])}
    page = (out / "report.html").read_text()
    for said in (
        f"{label_of(str(source))}, made differential and trained further",
        "Every other model against the Transformer",
        "Transformer before training",
    ):
        assert said in page
    assert compare(settings, out, source=source, jobs=1, resume=True, report=False) == {}
    again = {record.side: record.metrics for record in records_of(read_comparison(out))}
    assert again == {side: record.metrics for side, record in records.items()}
    with pytest.raises(ValueError, match=r"another configuration[^\0]*data\.tokenizer"):
        compare(settings, out, source=make(Qwen3Config), resume=True)


def test_a_model_that_keeps_its_class_goes_on_in_it(make, settings, here, tmp_path):
    source, out = make(Qwen3Config), tmp_path / "out"
    with pytest.raises(ValueError, match=r"--set has model.backend, and .* keeps its class and its"):
        compare(override(settings, ["model.backend=reference"]), out, source=source)
    before = content(source)
    compare(override(settings, ["train.weights=attention"]), out, source=source, seeds=2, jobs=1, report=False)
    assert content(source) == before
    assert {path.name for path in (out / "initial").iterdir()} == {"diff", "diff_v2", "wider"}
    kind, rows = type(loaded(source)), {}
    for side in ARMS:
        model = loaded(out / "members" / f"{side}-seed1" / "run" / "model")
        assert type(model) is kind
        assert hasattr(model.model.layers[0].self_attn, LAMBDA) == (side in ("diff", "diff_v2"))
        was = loaded(source).model.layers[0]
        assert torch.equal(model.model.layers[0].mlp.up_proj.weight, was.mlp.up_proj.weight)
        assert not torch.equal(model.model.layers[0].self_attn.v_proj.weight[:8], was.self_attn.v_proj.weight[:8])
        for seed in (0, 1):
            log = (out / "members" / f"{side}-seed{seed}" / "run" / "metrics.jsonl").read_text()
            rows.setdefault(seed, set()).add(json.loads(log.splitlines()[0])["rows"])
    assert rows[0] != rows[1]
    assert [len(digests) for digests in rows.values()] == [1, 1]
    assert not (out / "members" / "source-seed1").exists()
    assert len(records_of(read_comparison(out))) == 9
    trained = out / "members" / "diff-seed1" / "run" / "model"
    card = (trained / "README.md").read_text()
    assert " with differential attention (`diff`, arXiv 2410.05258)\n" in card


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_other_arms_start_with_the_logits_of_the_source(make, settings, tmp_path, kind):
    found, ids = read_source(make(kind), ("diff_v3", "dex", "attention", "lora")), torch.randint(0, 400, (2, 20))
    assert [*found.models] == ["softmax", "diff_v3", "dex", "attention", "lora", "source"]
    config, out = found.configured(settings), tmp_path / "out"
    found.write(out)
    assert {path.name for path in (out / "initial").iterdir()} - {"softmax"} == {"diff_v3", "dex"}
    with torch.no_grad():
        expected = loaded(found.folder)(ids).logits
    for side in found.models:
        arm = found.run(config, side, 0, out)
        resolve(arm)
        assert arm.train.weights == (side if side in ("dex", "attention", "lora") else "all")
        with torch.no_grad():
            torch.testing.assert_close(loaded(arm.train.initial_model)(ids).logits, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"no arm 'v3'.*there are: diff, diff_v2, diff_v3, dex"):
        read_source(found.folder, ["v3"])
    with pytest.raises(UserError, match="arms are dex, which need a pretrained model"):
        compare("debug", out, arms=["dex"])


def test_no_side_is_trained_with_the_dropout_that_differential_attention_lacks(make, settings, tmp_path):
    found, ids = read_source(make(GPT2Config)), torch.randint(0, 400, (2, 20))
    assert found.dropout == ("attn_pdrop",)
    found.write(tmp_path)
    for side in found.models:
        config = found.run(found.configured(settings), side, 0, tmp_path)
        folder = config.train.initial_model
        assert folder != str(found.folder)
        model = AutoModelForCausalLM.from_pretrained(folder, resid_pdrop=0.0, embd_pdrop=0.0).train()
        assert torch.equal(model(ids).logits, model(ids).logits), side


def test_a_model_of_the_hub_is_called_by_its_name():
    assert label_of("/cache/models--acme--tiny/snapshots/12fd25f77366fa6b3b4b768ec3050bf629380bac") == "tiny"
    assert label_of("runs/members/diff-seed0/run/model") == "diff-seed0"


def test_without_a_control_it_says_why(make, tmp_path):
    found = read_source(make(GPT2Config))
    assert found.no_control.startswith("GPT2LMHeadModel cannot get more heads: ")
    assert [*found.models] == ["softmax", "diff", "diff_v2", "source"]
    shutil.copytree(make(GPT2Config), tmp_path / "biases")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 1, "attention_bias": True}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=400, **SIZES | sizes))
    model.save_pretrained(tmp_path / "biases")
    found = read_source(tmp_path / "biases", ["wider", "diff_v2"])
    assert found.no_control.startswith("The hidden size (32) is not a multiple of the number of attention heads (7)")


def gguf(folder):
    (folder / "model.safetensors").rename(folder / "model.gguf")


def without_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def quantised(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq"}}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (gguf, r"holds no .safetensors file; .*docs/conversion.md.* or GGUF"),
        (without_tokenizer, "has no tokenizer_config.json"),
        (quantised, "has quantised weights"),
    ],
)
def test_a_damaged_source_is_refused_in_a_sentence(make, settings, damage, message, tmp_path):
    shutil.copytree(make(LlamaConfig), tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(UserError, match=message):
        compare(settings, tmp_path / "out", source=tmp_path / "m")
    assert not (tmp_path / "out").exists()


def test_a_model_that_an_arm_or_the_comparison_cannot_start_from_is_refused(make, tmp_path):
    with pytest.raises(UserError, match="GPT2Attention has them in one matrix"):
        read_source(make(GPT2Config), ["diff_v2", "dex"])
    convert_folder(make(Qwen3Config), tmp_path / "m", "diff_v2")
    with pytest.raises(UserError, match="holds a differential model; give the softmax Transformer"):
        read_source(tmp_path / "m", ["lora"])


def test_an_architecture_that_cannot_go_on_is_refused(make, settings, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be trained: .*caps its scores \(attn_logit_softcapping\)"):
        compare(settings, tmp_path / "out", source=make(Gemma2Config))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("assignments", "options", "message"),
    [
        (["data.corpus=SMALL"], {}, r"the corpus has \d+ tokens, less than one window of 96; give more text"),
        (["data.length=300"], {}, "data.length is 300, and .* has 256 positions"),
        (["data.tokenizer=bytes"], {}, "data.tokenizer is bytes, and a pretrained model keeps its own"),
        (["model.hidden_size=48"], {}, "model.hidden_size of the recipe or --set is 48, and .* has 36; leave it out"),
        (["evaluation.recall_steps=2"], {}, "evaluation.recall_steps trains small models from random weights"),
        (["train.weights=dex"], {}, "train.weights is 'dex', which softmax attention has not; give --arms dex"),
        (["train.initial_model=other"], {}, "train.initial_model is other; leave it out, --from is the model"),
        (
            [],
            {"variants": ["dint"]},
            "variants are dint, and a comparison from a source takes arms: diff, diff_v2, diff_v3, dex",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(
    make, settings, assignments, options, message, tmp_path
):
    (tmp_path / "small.txt").write_text("a few words")
    given = [one.replace("SMALL", str(tmp_path / "small.txt")) for one in assignments]
    with pytest.raises(ValueError, match=message):
        compare(override(settings, given), tmp_path / "out", source=make(LlamaConfig), **options)
    assert not (tmp_path / "out").exists()


def test_a_recipe_of_other_models_is_refused_and_positions_may_be_raised(make, settings):
    found = read_source(make(LlamaConfig))
    with pytest.raises(ValueError, match=r"model.hidden_size of the recipe or --set is 1024, and .* has 36"):
        found.configured(recipe("one_gpu"))
    longer = override(settings, ["model.max_position_embeddings=512", "data.length=300"])
    with pytest.raises(UserError, match=r"model.max_position_embeddings: the arm 'dex' keeps the source's config"):
        read_source(make(LlamaConfig), ["dex"]).configured(longer)
    assert found.configured(longer).model["max_position_embeddings"] == 512
