"""DEX on models of transformers: equal logits, the formula, what is trained, files, and folding into W_O."""

import copy
import functools

import pytest
import torch
from architectures import tiny
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from diff_transformer import differentiate, fold, lambda_init
from diff_transformer.errors import UserError
from diff_transformer.model.dex import extensions, heads_by_entropy, set_progress, trained_by_dex
from diff_transformer.model.dex_trainer import DexCallback
from diff_transformer.model.parts import read

NAMES = ["Llama", "Qwen3", "Gemma 3 (text)", "GPT-NeoX, Pythia", "GPT-2"]
_source = functools.cache(tiny)


def source(name="Llama"):
    return copy.deepcopy(_source(name)).eval()


def tokens(batch=2, length=13):
    return torch.randint(3, 101, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids=None):
    return model(tokens() if ids is None else ids).logits


def trained(name="Llama", heads=None, progress=0.5):
    """A model with DEX whose W_D and lambda are not 0."""
    model = differentiate(source(name), "dex", heads=heads)
    draw = torch.Generator().manual_seed(2)
    for module in extensions(model):
        module.weight.data.normal_(std=0.3, generator=draw)
        module.lam.data.fill_(0.7)
    set_progress(model, progress)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_logits_stay_and_folding_keeps_those_of_the_trained_model(name):
    before = logits(source(name))
    assert_close(logits(differentiate(source(name), "dex")), before, rtol=0, atol=0)
    model = trained(name)
    after = logits(model)
    assert not torch.allclose(after, before, atol=1e-3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(logits(compiled), after, rtol=1e-5, atol=2e-6)
    assert fold(model) is model
    assert not [*extensions(model)]
    assert_close(logits(model), after, rtol=1e-5, atol=2e-6)
    assert model.state_dict().keys() == source(name).state_dict().keys()
    read(model)  # a softmax model, which can be made differential again


def test_heads_are_changed_as_the_formula_says():
    """O' = O - lambda(t) O W_D for the chosen heads; lambda(t) = (1 - a) (t / T) lambda_init + a lambda_learned."""
    original = trained(heads=[[1], []], progress=0.25)
    model, before = copy.deepcopy(original), logits(original)
    assert_close(logits(model), before)
    first, second = extensions(model)
    lam = 0.75 * 0.25 * lambda_init(0) + 0.25 * 0.7
    assert first.present_lambda().item() == pytest.approx(lam)
    assert second.present_lambda().item() == pytest.approx(0.75 * 0.25 * lambda_init(1) + 0.25 * 0.7)
    d = len(first.weight)
    heads = torch.randn(2, 3, 4 * d, generator=torch.Generator().manual_seed(0)).double()
    expected = heads.clone().unflatten(-1, (4, d))
    expected[..., 1, :] -= lam * expected[..., 1, :] @ first.weight.double()
    with torch.no_grad():
        assert_close(first.double()(heads), expected.flatten(-2))
        assert_close(second.double()(heads), heads)
    for share, expected_lambda in ((0, 0.0), (1, 0.7)):
        set_progress(model, share)
        assert first.present_lambda().item() == pytest.approx(expected_lambda)
    assert not torch.allclose(logits(model.float()), before, atol=1e-3)  # a copy has an extension of its own
    assert_close(logits(original), before)


def test_a_model_is_saved_with_its_progress(tmp_path):
    model = trained(heads=[[0, 2], [3]])
    model.save_pretrained(save_directory=tmp_path)
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert_close(logits(loaded), logits(model), rtol=0, atol=0)
    fold(loaded).save_pretrained(tmp_path / "folded")
    assert "differential" not in (tmp_path / "folded" / "config.json").read_text()
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "folded")), logits(model), rtol=1e-5, atol=2e-6)


def step(model, optimizer, share):
    set_progress(model, share)
    model(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_to_add_instead_of_to_subtract_is_the_same_model():
    """W_D starts at 0 and Adam does not see the sign of a gradient: with lambda negated, W_D is negated."""
    found = []
    for sign in (1, -1):
        model = differentiate(source(), "dex")
        for module in extensions(model):
            module.start *= sign
            module.lam.requires_grad_(False)
        optimizer = torch.optim.AdamW([x for x in trained_by_dex(model) if x.requires_grad], lr=1e-2)
        for number in range(4):
            step(model, optimizer, number / 8)
        found.append((logits(model), next(extensions(model)).weight.detach().clone()))
    assert found[0][1].abs().max() > 1e-3
    assert_close(found[1][1], -found[0][1], rtol=1e-4, atol=1e-6)
    assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "out"), [("Qwen3", "o_proj"), ("Phi", "dense")])
def test_queries_and_the_rest_are_not_trained(name, out):
    model = differentiate(source(name), "dex")
    ids = {id(x) for x in trained_by_dex(model)}
    names = {name.rpartition("self_attn.")[2] for name, x in model.named_parameters() if id(x) in ids}
    assert {name for name in names if "bias" not in name} == {
        "k_proj.weight", "v_proj.weight", f"{out}.weight", "dex.weight", "dex.lam"
    }  # fmt: skip
    with pytest.raises(UserError, match=r"GPTNeoXAttention has them in one matrix; give train.weights=attention"):
        trained_by_dex(differentiate(source("GPT-NeoX, Pythia"), "dex"))


def test_an_adapter_trains_the_extension_and_folds():
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(target_modules=["o_proj"], modules_to_save=["dex"], init_lora_weights=False)
    adapted = get_peft_model(trained(), settings)
    adapted(tokens(), labels=tokens()).loss.backward()
    assert all(x.grad is not None and x.grad.any() for x in adapted.parameters() if x.requires_grad)
    expected = logits(adapted.eval())
    with pytest.raises(UserError, match="give the model before adapters and quantisation, or merge them first"):
        fold(adapted)
    assert_close(logits(adapted), expected, rtol=0, atol=0)  # a refusal changes nothing
    merged = adapted.merge_and_unload()
    assert_close(logits(merged), expected, rtol=1e-5, atol=5e-6)
    assert_close(logits(fold(merged)), expected, rtol=1e-5, atol=5e-6)


def test_the_trainer_of_transformers_moves_lambda(tmp_path):
    model = differentiate(source(), "dex")
    rows = [{"input_ids": row, "labels": row} for row in tokens(4)]
    settings = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    Trainer(model, settings, train_dataset=rows, callbacks=[DexCallback()]).train()
    assert [module.progress.item() for module in extensions(model)] == [1.0, 1.0]


def test_heads_are_chosen_by_the_entropy_of_their_attention():
    model = source()
    q = model.model.layers[0].self_attn.q_proj
    q.weight.data[: q.out_features // 4] = 0  # the first head is uniform
    q.weight.data[q.out_features // 4 :] *= 30
    chosen = heads_by_entropy(model, tokens(), share=0.25)
    assert chosen[0] == [0]
    assert [len(of) for of in heads_by_entropy(model, tokens())] == [2, 2]
    with pytest.raises(ValueError, match="share is 2; it must be above 0 and at most 1"):
        heads_by_entropy(model, tokens(), share=2)
    assert model.config._attn_implementation == source().config._attn_implementation
    changed = differentiate(model, "dex", heads=chosen)
    assert next(extensions(changed)).chosen.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: differentiate(source(), "dex", heads=[[4], []]), r"heads\[0\] has 4, and the layer has 4 heads"),
        (lambda: differentiate(source(), "dex", heads=[[1]]), r"heads has 1 layers, and the model has 2"),
        (lambda: differentiate(source(), "diff", heads=[[1], []]), "heads are for kind 'dex', and kind is 'diff'"),
        (lambda: differentiate(source(), "dex", lambda_init=0.3), "'dex' has a start of its own; leave it out"),
        (lambda: differentiate(trained(), "dex"), "is differential already"),
        (lambda: fold(source()), "LlamaForCausalLM has no DEX to fold"),
        (lambda: fold(differentiate(source(), "diff_v2")), "has no DEX to fold"),
    ],
)
def test_what_cannot_be_is_one_sentence(call, message):
    with pytest.raises(UserError, match=message):
        call()
