"""lm_eval, PEFT and transformers.pipeline on checkpoints of ours, each from a saved folder."""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.model.presets import preset

PAIR = pytest.mark.parametrize("attention", ["diff", "softmax"])


@pytest.fixture
def folder(attention, tmp_path):
    torch.manual_seed(0)
    config = preset(
        "debug", vocab_size=258, attention=attention, embedding_initializer_range=1.0, num_key_value_heads=2
    )
    DiffTransformerForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


ROWS = [
    {"question": "Two and two is", "choices": ["four", "five"], "answer": 0},
    {"question": "Snow is", "choices": ["black", "white"], "answer": 1},
]


def facts(folder):
    """A task of the harness with two choices."""
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return {
        "task": "facts", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}, "cache_dir": str(folder / "cache")},
        "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("attention", ["diff"])
def test_the_harness_s_own_command_opens_a_folder_as_the_page_says(folder, tmp_path):
    pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
    page = (Path(__file__).parents[2] / "docs" / "inference.md").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^    (.*--model hf .*)$", page, re.MULTILINE)]
    assert [command[0] for command in commands] == ["python", "lm_eval"]
    (tmp_path / "facts.yaml").write_text(json.dumps(facts(tmp_path)))  # JSON is YAML
    more = ["--tasks", "facts", "--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "1"]
    told = []
    for program, *arguments in commands:
        start = [sys.executable] if program == "python" else [sys.executable, "-m", program]
        done = subprocess.run(
            [*start, *arguments[: arguments.index("--tasks")], *more],
            cwd=tmp_path, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told.append(re.findall(r"\|facts\s*\|.*", done.stdout))
    assert told[0]
    assert told[0] == told[1]


@PAIR
def test_the_harness_scores_a_checkpoint(folder, tmp_path):
    """Its own model class on a task of two choices; the log-likelihoods are those of the model itself."""
    lm_eval = pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    task = facts(tmp_path)
    lm = HFLM(pretrained=str(folder), tokenizer=str(folder), device="cpu", max_length=128, batch_size=2)
    assert type(lm.model) is DiffTransformerForCausalLM
    outcome = lm_eval.simple_evaluate(
        lm, tasks=[task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, log_samples=True
    )
    right = 0
    for sample, row in zip(outcome["samples"]["facts"], ROWS, strict=True):
        expected = [_logprob(lm.model, row["question"], " " + choice) for choice in row["choices"]]
        assert [float(r[0]) for r in sample["filtered_resps"]] == pytest.approx(expected, abs=1e-3)
        right += max(range(2), key=expected.__getitem__) == row["answer"]
    assert outcome["results"]["facts"]["acc,none"] == right / 2


def _logprob(model, context: str, continuation: str) -> float:
    ids = torch.tensor([list((context + continuation).encode())])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0]
    start = len(context.encode())
    return math.fsum(logprobs[place - 1, ids[0, place]].item() for place in range(start, ids.shape[1]))


@PAIR
def test_lora_trains_saves_loads_and_merges(folder, tmp_path):
    peft = pytest.importorskip("peft", reason="the extra `inference` is not installed")
    ids = torch.randint(0, 256, (4, 24))
    base = AutoModelForCausalLM.from_pretrained(folder)
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, settings)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    losses = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = {name.removeprefix("base_model.model.") for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 4 * base.config.num_hidden_layers
    assert all("lora_" in name for name in trained)
    for name, parameter in model.get_base_model().named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")]), name
    model.eval().save_pretrained(tmp_path / "adapter")
    assert {path.suffix for path in (tmp_path / "adapter").iterdir()} == {".safetensors", ".json", ".md"}
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    expected = model(ids).logits
    assert torch.equal(loaded(ids).logits, expected)
    merged = loaded.merge_and_unload()
    assert type(merged) is DiffTransformerForCausalLM
    torch.testing.assert_close(merged(ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert (expected - AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits).abs().max() > 0.01


@PAIR
def test_the_pipeline_generates(folder):
    generator = pipeline("text-generation", model=str(folder), device="cpu")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    alone = [generator(prompt, **options)[0]["generated_text"] for prompt in ("hello", "a longer one")]
    assert all(text.startswith(prompt) for text, prompt in zip(alone, ("hello", "a longer one"), strict=True))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    out = model.generate(torch.tensor([list(b"hello")]), pad_token_id=257, **options)
    assert tokenizer.decode(out[0], skip_special_tokens=True) == alone[0]
    batch = generator(["hello", "a longer one"], batch_size=2, **options)
    assert [texts[0]["generated_text"] for texts in batch] == alone
