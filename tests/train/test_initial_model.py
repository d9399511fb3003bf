"""The model that a run starts with."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config, Starcoder2Config

from diff_transformer import differentiate, fold
from diff_transformer.errors import UserError
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.spec import side_model
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert import convert_model
from diff_transformer.model.dex import extensions
from diff_transformer.model.loading import read_model
from diff_transformer.model.matching import VARIANTS
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.model.parts import layers_of
from diff_transformer.train.config import override
from diff_transformer.train.initial_model import build_model, draw_weights, unfilled_model
from diff_transformer.train.loop import train
from diff_transformer.train.loss import Objective
from diff_transformer.train.metrics import read_metrics
from diff_transformer.train.parallelize import shard
from diff_transformer.train.plan import resolve
from diff_transformer.train.recompute import recompute
from diff_transformer.train.training_data import load_training_data

QWEN = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
TOKENIZER = SimpleNamespace(pad_token_id=None, bos_token_id=None, eos_token_id=0)


def seeded(seed: int, attention: str = "diff"):
    return build_model(override(recipe("debug"), [f"train.seed={seed}", f"model.attention={attention}"]), TOKENIZER)


def test_weights_are_a_function_of_seed_and_name():
    first, again, other = (seeded(seed).state_dict() for seed in (0, 0, 1))
    wide = seeded(1).double()
    draw_weights(wide, seed=0)
    layers = [first[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1)]
    for values in (again, wide.state_dict()):
        assert all(torch.equal(first[name].to(values[name]), values[name]) for name in first)
    assert not torch.equal(*layers)
    assert not torch.equal(other["model.embed_tokens.weight"], first["model.embed_tokens.weight"])


@pytest.mark.parametrize("attention", ["diff", "diff_v2", "softmax"])
def test_weights_have_the_distribution_of_the_constructor(attention):
    drawn = seeded(3, attention)
    torch.manual_seed(0)
    for name, expected in DiffTransformerForCausalLM(drawn.config).named_parameters():
        value = drawn.get_parameter(name)
        assert value.isfinite().all()
        assert value.mean().item() == pytest.approx(expected.mean().item(), abs=6 * expected.numel() ** -0.5 * 0.1), (
            name
        )
        assert value.std().item() == pytest.approx(expected.std().item(), rel=0.7, abs=1e-9), name
    assert drawn.lm_head.weight is drawn.model.embed_tokens.weight


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_trained_is_what_was_asked_for(name):
    config = recipe("debug")
    config.model = side_model(config, name) | {"head_norm_init": 0.1}
    model = build_model(config, TOKENIZER)
    expected = DiffTransformerForCausalLM(DiffTransformerConfig(**config.model))
    assert [(name, value.shape) for name, value in model.named_parameters()] == [
        (name, value.shape) for name, value in expected.named_parameters()
    ]
    for field, value in config.model.items():
        assert getattr(model.config, field) == value


@pytest.mark.parametrize(
    ("ways", "replicas", "settings"),
    [(1, 1, []), (1, 2, ["model.tie_word_embeddings=false"]), (2, 1, ["model.attention=diff_v2"]), (2, 2, [])],
)
def test_each_process_holds_its_part_of_the_model_of_one_process(ways, replicas, settings):
    """Four processes, one after another, in a group that exchanges nothing: ways x (4 / ways), in replicas."""
    config, parts = override(recipe("debug"), [*settings, "model.head_norm_init=1.0"]), []
    whole = build_model(config, TOKENIZER)
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (4 // ways, ways), mesh_dim_names=("data_parallel", "tensor_parallel"))
            model = unfilled_model(resolve(config), TOKENIZER)
            shard(Objective(model), mesh, precision="32-true", replicas=replicas)
            draw_weights(model, config.train.seed)
            parameters = dict(model.named_parameters())
            for name, value in whole.named_parameters():
                part = parameters.pop(name)
                assert torch.equal(part.to_local(), part_of(value, part)), (rank, name)
            assert not parameters
            parts.append(sum(part.to_local().numel() for part in model.parameters()))
            own, ours = (dict(model.named_buffers()) for model in (model, whole))
            assert own.keys() == ours.keys()
            assert all(torch.equal(own[name], ours[name]) for name in own)
        finally:
            dist.destroy_process_group()
    assert max(parts) < 1.1 * whole.num_parameters() * replicas / 4


def part_of(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    shape, offset = compute_local_shape_and_global_offset(value.shape, like.device_mesh, like.placements)
    return value.detach()[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


@pytest.fixture(scope="module")
def config(texts):
    settings = [
        f"data.corpus={texts}", "data.max_bytes=null", "train.steps=4", "data.mixture.needles=0",
        "data.mixture.recall=0", "model.attention=softmax", "model.head_norm_init=1.0",
    ]  # fmt: skip
    return override(recipe("debug"), settings)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    return train(config, tmp_path_factory.mktemp("run"))


def initial(config, folder, *settings):
    return override(config, [f"train.initial_model={folder}", *settings])


def validation_losses(folder):
    return [line["validation_loss"] for line in read_metrics(folder / "metrics.jsonl") if "validation_loss" in line]


def test_a_run_goes_on_from_a_run(config, trained, tmp_path):
    """Its first validation loss is the last of the run before, and what it saves names where it came from."""
    again = train(initial(config, trained.folder), tmp_path / "again")
    assert validation_losses(again.folder)[0] == pytest.approx(validation_losses(trained.folder)[-1], abs=1e-6)
    assert validation_losses(again.folder)[-1] < validation_losses(again.folder)[0]
    assert str(trained.folder) in (tmp_path / "again" / "config.json").read_text()


def test_a_folder_of_a_model_in_bf16_is_trained_in_fp32(config, trained, tmp_path):
    saved = AutoModelForCausalLM.from_pretrained(trained.folder / "model").to(torch.bfloat16)
    saved.save_pretrained(tmp_path / "half")
    model = build_model(initial(config, tmp_path / "half"), trained.tokenizer)
    expected = saved.state_dict()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(value, expected[name].float()) for name, value in model.state_dict().items())


def test_fields_of_the_run_replace_those_of_the_model(config, trained):
    """More positions and another rotary base with the same weights, to continue at another length."""
    run = initial(config, trained.folder, "model.max_position_embeddings=512")
    run.model["rope_parameters"] = {"rope_type": "default", "rope_theta": 640_000.0}
    model = build_model(run, trained.tokenizer)
    assert model.config.max_position_embeddings == 512
    assert model.config.rope_parameters["rope_theta"] == 640_000.0
    assert model.model.rotary_emb.inv_freq[1] < trained.model.model.rotary_emb.inv_freq[1]
    assert torch.equal(model.lm_head.weight, trained.model.lm_head.weight)


def test_a_converted_model_keeps_what_the_run_does_not_say(config, trained, tmp_path):
    """A configuration without a model, like that of the recipe ``uptrain``."""
    converted = convert_model(trained.model, "diff")
    converted.save_pretrained(tmp_path / "diff")
    run = initial(config, tmp_path / "diff")
    run.model = {}
    done = train(run, tmp_path / "run")
    assert done.model.config.attention == "diff"
    assert done.model.config.value_head_dim == trained.model.config.head_dim
    assert validation_losses(done.folder)[0] == pytest.approx(validation_losses(trained.folder)[-1], abs=1e-5)
    moved = done.model.model.layers[0].self_attn.q_proj.weight.unflatten(0, (-1, 2, converted.config.head_dim))
    assert not torch.equal(moved[:, 0], moved[:, 1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.attention=diff"], "by its configuration: .*missing: .*lambda"),
        (["model.intermediate_size=128"], "by its configuration: .*of another shape"),
        (["data.length=600"], "data.length is 600, more than model.max_position_embeddings"),
    ],
)
def test_another_model_than_the_weights_is_refused(config, trained, settings, message):
    with pytest.raises(ValueError, match=message):
        build_model(initial(config, trained.folder, *settings), trained.tokenizer)


def test_another_tokenizer_is_refused(config, trained):
    other = initial(config, trained.folder, "data.tokenizer=bytes")
    with pytest.raises(ValueError, match=r"was trained with another tokenizer; set data.tokenizer="):
        build_model(other, load_training_data(other).tokenizer)


def of_transformers(kind, tokenizer, folder, **fields):
    """A tiny decoder of transformers that no class here holds, saved with ``tokenizer``."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 512}
    model = AutoModelForCausalLM.from_config(kind(vocab_size=len(tokenizer), **sizes, **fields))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", [None, "diff", "diff_v2"])
def test_a_model_that_keeps_its_class_trains_in_the_same_loop(config, trained, tmp_path, kind):
    model = of_transformers(Qwen3Config, trained.tokenizer, tmp_path / "m", **QWEN).eval()
    if kind is not None:
        differentiate(model, kind).save_pretrained(tmp_path / "m")
    run = initial(config, tmp_path / "m", "train.steps=3", "optim.warmup_steps=1")
    run.model = {}
    done = train(run, tmp_path / "run")
    for what in ("selective", "full"):
        run.train.activation_checkpointing = what
        again = train(run, tmp_path / what).folder
        assert validation_losses(again) == pytest.approx(validation_losses(done.folder), abs=1e-5)
    rows = load_training_data(run).validation
    with torch.no_grad():
        assert validation_losses(done.folder)[0] == pytest.approx(model(rows, labels=rows).loss.item(), abs=1e-5)
    again = AutoModelForCausalLM.from_pretrained(done.folder / "model")
    assert type(again) is type(done.model) is type(model)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, again.get_parameter(name))
    assert (done.folder / "model" / "README.md").exists() == (kind is not None)
    run.model = {"num_hidden_layers": 8}
    with pytest.raises(
        ValueError, match=r"config.model has num_hidden_layers, and the 'qwen3' model .*`--recipe uptrain"
    ):
        build_model(run, trained.tokenizer)


@pytest.mark.parametrize("of_attention", [0.0, 0.1])
def test_recomputed_layers_drop_what_they_dropped(of_attention, tmp_path):
    fields = {"num_key_value_heads": 2, "residual_dropout": 0.1, "attention_dropout": of_attention}
    gradients, ids = {}, torch.randint(0, 99, (2, 16))
    for what in ("none", "selective", "full"):
        torch.manual_seed(0)
        config = Starcoder2Config(
            vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **fields
        )
        model = AutoModelForCausalLM.from_config(config).train()
        recompute(model, what)
        model(ids, labels=ids).loss.backward()
        gradients[what] = model.get_input_embeddings().weight.grad
    torch.testing.assert_close(gradients["selective"], gradients["none"])
    torch.testing.assert_close(gradients["full"], gradients["none"])


def test_attention_alone_trains(config, trained, tmp_path):
    run = initial(config, trained.folder, "train.weights=attention", "train.loss_chunk=50", "train.steps=3")
    done = train(run, tmp_path / "run")
    for name, parameter in build_model(run, trained.tokenizer).named_parameters():
        assert torch.equal(parameter, done.model.get_parameter(name)) != (".self_attn." in name)


@pytest.mark.parametrize("kind", ["ours", "diff", "diff_v2", "GPT-2"])
def test_adapters_of_attention_train(config, trained, tmp_path, kind):
    """The adapters end in the saved model's own matrices, each changed by a product of rank 2 alone."""
    folder = trained.folder / "model"
    if kind != "ours":
        folder = tmp_path / "m"
        if kind == "GPT-2":
            of_transformers(GPT2Config, trained.tokenizer, folder)
        else:
            model = of_transformers(Qwen3Config, trained.tokenizer, folder, **QWEN)
            differentiate(model, kind).save_pretrained(folder)
    run = initial(config, folder, "train.weights=lora", "train.lora_rank=2", "train.steps=3", "train.loss_chunk=50")
    run.model = run.model if kind == "ours" else {}
    start, ids = build_model(run, trained.tokenizer).eval(), torch.arange(40)[None]
    assert len(layers_of(start)) == start.config.num_hidden_layers  # by whatever name, to be sharded or compiled
    made = train(run, tmp_path / "run").model
    saved = read_model(tmp_path / "run" / "model").eval()
    torch.testing.assert_close(saved(ids).logits, made(ids).logits)
    assert type(saved) is type(made) is type(start)
    assert not hasattr(made, "peft_config")
    assert saved.state_dict().keys() == start.state_dict().keys()
    for name, parameter in start.named_parameters():
        change = saved.get_parameter(name) - parameter
        of_attention = bool({"self_attn", "attn"} & set(name.split(".")))
        assert change.any() == (of_attention and not name.endswith("bias")), name
        if of_attention and change.ndim == 2 and "lambda" not in name:
            sizes = torch.linalg.svdvals(change)
            assert sizes[2:].max() < 1e-6 < sizes[1], name


def test_adapters_resume_as_if_never_stopped(config, trained, tmp_path):
    run = initial(config, trained.folder, "train.weights=lora", "train.steps=4", "train.checkpoint_every=2")
    whole = train(run, tmp_path / "whole").model.state_dict()

    def stop(step, values):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "stopped", progress=stop)
    resumed = train(run, tmp_path / "stopped", resume=True).model.state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    again = train(run, tmp_path / "stopped", resume=True).model.state_dict()  # a finished run
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_dex_trains_its_own_weights_with_lambda_by_the_steps(config, trained, tmp_path):
    model = of_transformers(Qwen3Config, trained.tokenizer, tmp_path / "m", **QWEN)
    start = differentiate(model, "dex")
    start.save_pretrained(tmp_path / "m")
    run = initial(config, tmp_path / "m", "train.weights=dex", "train.steps=3", "train.loss_chunk=50", "optim.lr=0.01")
    run.model = {}
    made = train(run, tmp_path / "run").model
    for name, parameter in start.named_parameters():
        own = name.rpartition("self_attn.")[2]
        changes = own in ("k_proj.weight", "v_proj.weight", "o_proj.weight", "dex.weight", "dex.lam")
        assert torch.equal(parameter, made.get_parameter(name)) != changes, name
    assert [module.progress.item() for module in extensions(made)] == [1.0]
    saved, ids = read_model(tmp_path / "run" / "model").eval(), torch.arange(40)[None]
    torch.testing.assert_close(fold(saved)(ids).logits, made(ids).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="has no DEX to train"):
        train(initial(config, trained.folder, "train.weights=dex"), tmp_path / "other")


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "softmax"])
def test_weights_of_equal_shape_are_shared_with_the_pair(name):
    config = recipe("debug")
    softmax = build_model(override(config, ["model.attention=softmax"]), TOKENIZER).state_dict()
    config.model = side_model(config, name)
    model = build_model(config, TOKENIZER).state_dict()
    shared = {n for n in softmax if softmax[n].shape == model[n].shape}
    assert all(torch.equal(model[n], softmax[n]) for n in shared)
    part = {n.split(".", 3)[-1] for n in softmax.keys() - shared}
    feed_forward = {f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    own = {
        "diff_v2": {"self_attn.q_proj.weight", *feed_forward},
        "diff_v3": {"self_attn.q_proj.weight", *feed_forward},
        "grouped_diff": {f"self_attn.{p}_proj.weight" for p in "kvo"} | feed_forward,
        "gated": feed_forward,
    }
    assert part == own.get(name, set())
