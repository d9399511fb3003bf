"""Any decoder of transformers, made differential in place: the same logits, everything learns, everything loads."""

import copy
import functools
import json
import subprocess
import sys

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, RECORD, record, tiny
from transformers import AutoModelForCausalLM

from diff_transformer import differentiate
from diff_transformer.errors import UserError
from diff_transformer.model.convert import convert_model
from diff_transformer.model.differentiate import KINDS, SplitAttention

TAKEN = [row["model"] for row in json.loads(RECORD.read_text())["rows"] if not row["refused"]]
SHAPES = ["Qwen3", "Mistral", "Phi-3, Phi-4", "GPT-NeoX, Pythia", "GPT-2"]  # every kind of projections
_source = functools.cache(tiny)


def source(name):
    return copy.deepcopy(_source(name))


def made(name, kind="diff_v2", **options):
    return differentiate(source(name), kind, **options)


def tokens(batch=2, length=13):
    return torch.randint(3, 101, (batch, length), generator=torch.Generator().manual_seed(1))


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


def generated(model, **options):
    with torch.no_grad():
        return model.generate(tokens(), max_new_tokens=4, do_sample=False, **options).tolist()


def test_the_record_says_what_is_taken_and_why_the_rest_is_not():
    found, kept = record(), json.loads(RECORD.read_text())
    assert found["rows"] == kept["rows"], "run tests/helpers/architectures.py"
    assert [row["model"] for row in kept["rows"]] == [*ARCHITECTURES]


@pytest.mark.parametrize("name", TAKEN)
def test_logits_and_text_stay_and_everything_learns(name):
    ids, model = tokens(), source(name)
    ids[0, :5], mask = 0, torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    before, text = logits(model, ids, attention_mask=mask), model.generate(ids, **options)
    for kind in KINDS:
        changed = made(name, kind)
        output = changed(ids, attention_mask=mask, labels=ids, use_cache=False)
        torch.testing.assert_close(output.logits[:, 5:], before[:, 5:], rtol=1e-5, atol=4e-6)
        output.loss.backward()
        assert [key for key, x in changed.named_parameters() if x.grad is None or not x.grad.any()] == []
        assert torch.equal(changed.generate(ids, **options), text)


@pytest.mark.parametrize("name", SHAPES)
def test_static_cache_and_beams(name):
    greedy, beams = generated(source(name)), generated(source(name), num_beams=2)
    for kind in KINDS:
        changed = made(name, kind)
        if kind == "diff":
            with pytest.raises(UserError, match="needs a dynamic one"):
                generated(changed, cache_implementation="static", disable_compile=True)
        else:
            assert generated(changed, cache_implementation="static", disable_compile=True) == greedy
        assert generated(changed, num_beams=2) == beams


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_half_precision_is_scaled_without_rounding_and_round_trips(name, kind, tmp_path):
    model = source(name)
    for x in model.parameters():  # the frequencies of positions stay in fp32, as loading leaves them
        x.data = x.data.bfloat16()
    model.config.dtype = torch.bfloat16
    changed = differentiate(copy.deepcopy(model), kind)
    exact = logits(copy.deepcopy(model).float(), tokens())
    budget = 2 * (logits(model, tokens()).float() - exact).abs().max()
    assert (logits(changed, tokens()).float() - exact).abs().max() < budget
    changed.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert type(loaded) is type(model)
    assert loaded.config.model_type == model.config.model_type
    state = changed.state_dict()
    assert state.keys() == loaded.state_dict().keys()
    for key, x in loaded.state_dict().items():
        assert x.dtype == state[key].dtype == (torch.float32 if "differential_lambda.lambda" in key else torch.bfloat16)
        assert torch.equal(x, state[key])
    assert torch.equal(logits(loaded, tokens()), logits(changed, tokens()))
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_other_heads_and_implementations_load(kind, tmp_path):
    changed = made("Qwen3", kind)
    changed.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "diff_auto"
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {key.rpartition(".")[2]: x.dtype for key, x in half.named_parameters()}
    assert dtypes.pop("lambda_q1", torch.float32) == dtypes.pop("lambda_k2", torch.float32) == torch.float32
    assert dtypes["weight"] == torch.bfloat16
    body = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="diff_reference")
    assert body.config._attn_implementation == "diff_reference"
    with torch.no_grad():
        expected = changed.model(tokens()).last_hidden_state
        torch.testing.assert_close(body(tokens()).last_hidden_state, expected, rtol=1e-5, atol=4e-6)
    labelled = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    labelled(tokens()[:1]).logits.sum().backward()
    assert labelled.model.layers[0].self_attn.differential_lambda is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_in_one_graph(kind):
    torch._dynamo.reset()  # else sizes that other models varied are dynamic
    model = made("Mistral", kind)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    if kind == "diff":  # whose values are fewer than its keys
        cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(tokens()).logits
        torch.testing.assert_close(compiled(tokens(), use_cache=False).logits, expected)
        model(tokens()[:, :-1], past_key_values=cache)
        last = compiled(tokens()[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(last[:, 0], expected[:, -1], rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device_and_device_maps(kind, tmp_path):
    with torch.device("meta"):
        meta = differentiate(AutoModelForCausalLM.from_config(source("Phi-3, Phi-4").config), kind)
    assert {x.device.type for x in meta.state_dict().values()} == {"meta"}
    changed = made("Phi-3, Phi-4", kind)
    assert {k: x.shape for k, x in meta.state_dict().items()} == {k: x.shape for k, x in changed.state_dict().items()}
    source("Qwen3").save_pretrained(tmp_path / "source")
    placed = AutoModelForCausalLM.from_pretrained(tmp_path / "source", device_map={"": "cpu"})
    expected = logits(source("Qwen3"), tokens())
    torch.testing.assert_close(logits(differentiate(placed, kind), tokens()), expected, rtol=1e-5, atol=4e-6)
    made("Qwen3", kind).save_pretrained(tmp_path / "made")
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "made", device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path / "disk"
    )
    torch.testing.assert_close(logits(offloaded, tokens()), expected, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize(("kind", "lambda_init"), [("diff", 0.5), ("diff", 0.3), ("diff_v2", 0.5), ("diff_v3", 0.5)])
def test_agrees_with_the_conversion_of_a_llama(kind, lambda_init):
    options = {"lambda_init": lambda_init} if kind == "diff" else {}
    ours = convert_model(source("Llama"), kind, **options)
    changed = made("Llama", kind, **options)
    torch.testing.assert_close(logits(changed, tokens()), logits(ours, tokens()), rtol=1e-5, atol=4e-6)
    for model in (changed, ours):
        model(tokens(), labels=tokens()).loss.backward()
    for part in ("q_proj", "k_proj", "v_proj"):
        gradients = [getattr(x.model.layers[0].self_attn, part).weight.grad for x in (changed, ours)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_experiments_read_both_maps(kind):
    from diff_transformer.evals.attention_tap import changed_logits, tapped_attention

    model, calls = made("Qwen3", kind), []
    expected = logits(model, tokens())
    with tapped_attention(model, calls.append):
        assert torch.equal(logits(model, tokens()), expected)
    maps = calls[0].maps()
    torch.testing.assert_close(maps[0], maps[1])
    torch.testing.assert_close(calls[0].attention(), (0.25 if kind == "diff_v3" else 0.5) * maps[0])
    with changed_logits(model, lambda call: lambda found, allowed: found):
        torch.testing.assert_close(logits(model, tokens()), expected, rtol=1e-5, atol=4e-6)


def test_lora_on_the_new_projections(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    made("Qwen3").save_pretrained(tmp_path / "model")
    settings = LoraConfig(target_modules=["q_proj"], modules_to_save=["differential_lambda"], init_lora_weights=False)
    adapted = get_peft_model(made("Qwen3"), settings).train()
    adapted(tokens(), labels=tokens()).loss.backward()
    learns = {key for key, x in adapted.named_parameters() if x.grad is not None and x.grad.any()}
    assert learns == {key for key, x in adapted.named_parameters() if x.requires_grad}
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = logits(adapted.eval(), tokens())
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), tokens()), expected)
    torch.testing.assert_close(logits(adapted.merge_and_unload(), tokens()), expected, rtol=1e-4, atol=1e-5)


def _arguments(kind, folder, **options):
    return kind(
        str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, bf16=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_resumes(kind, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in tokens(8)]
    arguments = _arguments(transformers.TrainingArguments, tmp_path, learning_rate=1e-2, gradient_checkpointing=True)
    trainer = transformers.Trainer(made("Qwen3", kind), arguments, train_dataset=rows)
    trainer.train()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    resumed = transformers.Trainer(loaded, arguments, train_dataset=rows)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for one, other in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_process_needs_the_package_and_says_so(tmp_path):
    made("Qwen3").save_pretrained(tmp_path)
    load = f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
    show = "print(model.model.layers[0].self_attn.differential_lambda)"
    imports = ["import diff_transformer\n", "from transformers import AutoModelForCausalLM\n"]

    def run(*lines):
        return subprocess.run([sys.executable, "-c", "".join(lines)], capture_output=True, text=True, check=False)

    for order in (imports, imports[::-1]):
        assert "TokenLambda" in run(*order, load, show).stdout
    error = run(imports[1], load).stderr
    assert 'Specified `attn_implementation="diff_auto"` is not supported' in error


def refused(message, model, *args, error=ValueError, **options):
    state = {key: x.clone() for key, x in model.state_dict().items()}
    with pytest.raises(error, match=message):
        differentiate(model, *args, **options)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


def test_bad_arguments_are_refused():
    refused("no kind of .* 'dint'.*; there are: diff_v2, diff_v3, diff", source("Qwen3"), "dint")
    for value in (0, 1, -0.5, float("nan"), "half"):
        refused("give a number between 0 and 1, neither of them", source("Qwen3"), "diff", lambda_init=value)
    refused("'diff_v2' has a start of its own; leave it out", source("Qwen3"), lambda_init=0.3)


def test_models_that_cannot_be_doubled_are_refused():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(source("Qwen3"), LoraConfig(target_modules=["q_proj"]))
    refused("PeftModel.*PEFT adapters come after", adapted, error=UserError)
    refused(r"q_proj of Qwen3Attention is a peft.*Linear; give the model before adapters", adapted.base_model.model)
    refused("is differential already", made("Qwen3"))
    refused("is a model of this package; convert_model converts it", convert_model(source("Llama")))
    quantised = source("Qwen3")
    quantised.config.quantization_config = {"quant_method": "torchao"}
    refused("has quantised weights", quantised)


def test_softmax_attention_does_not_run_under_our_names():
    model = source("Qwen3")
    model.set_attn_implementation("diff_auto")
    with pytest.raises(ValueError, match=r"has softmax attention, .*; call diff_transformer.differentiate"):
        model(tokens())
    model = differentiate(source("Qwen3"))
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"is differential, .*'sdpa' computes softmax attention; call model.set_attn"):
        model(tokens())


@pytest.mark.parametrize("kind", ["diff_v2", "dex"])
def test_another_model_of_the_same_configuration_stays_softmax(kind):
    model = source("Llama")
    config, names = model.config, model.state_dict().keys()
    assert differentiate(model, kind).config.differential["kind"] == kind
    assert type(model)(config).state_dict().keys() == names != model.state_dict().keys()


def test_dropout_is_left_out_with_a_warning():
    model = tiny("GPT-2", attn_pdrop=0.1, resid_pdrop=0.5)
    with pytest.warns(UserWarning, match=r"attention dropout 0\.1 is left out"):
        differentiate(model)
    assert isinstance(model.transformer.h[0].attn, SplitAttention)
    torch.manual_seed(0)
    model.train()
    assert not torch.equal(logits(model, tokens()), logits(model, tokens()))  # that of the residual stays
