from dataclasses import replace

import pytest
import torch

from diff_transformer.bench import pair, record

TINY = pair.PairSetting("debug", 2, 16, {"num_hidden_layers": 1}, torch.float32)


def test_both_sides_of_a_setting(kept_times):
    times = kept_times()
    made = pair.run_pair_benchmark([TINY], repeats=2)
    softmax, diff = made["rows"]
    assert (softmax["side"], diff["side"]) == ("softmax", "diff")
    assert (diff["layers"], diff["layers_of_preset"]) == (1, 2)
    assert diff["parameters"] == softmax["parameters"] + 6 * 8
    for kind in ("forward_backward", "prefill"):
        assert softmax[f"{kind}_ratio"] == 1.0
        assert diff[f"{kind}_ratio"] == round(times["softmax", kind].over(times["diff", kind]), 4)
    rate, (low, high) = diff["prefill_tokens_per_second"], diff["prefill_quartiles"]
    assert 0 < low <= rate <= high
    assert rate == pytest.approx(32 / times["diff", "prefill"].median, rel=1e-3)


def test_both_models_are_compiled_where_the_setting_says_so(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: compiled.append(model.config.attention))
    rows = pair.run_pair_benchmark([replace(TINY, compiled=True), TINY], repeats=1)["rows"]
    assert compiled == ["softmax", "diff"]
    assert [row["compiled"] for row in rows] == [True, True, False, False]


def test_weights_are_in_bf16_and_lambda_is_not():
    model = pair.build_model(TINY.config(), "cpu", torch.bfloat16)
    dtypes = {name.rsplit(".", 1)[-1]: p.dtype for name, p in model.named_parameters()}
    assert dtypes.pop("lambda_q1") == torch.float32
    assert dtypes["weight"] == torch.bfloat16


def test_table_7():
    assert {(s.model, s.length) for s in pair.SETTINGS["cuda"]} == pair.PAPER.keys()
    assert all(s.config().head_dim == 128 for s in pair.SETTINGS["cuda"])


def test_models_generate_over_a_cache_that_keeps_its_length(kept_times):
    times = kept_times()
    setting = pair.PairSetting("debug", 2, 20, dtype=torch.float32, tokens=3)
    softmax, diff = pair.generation_rows(setting, record.Options(repeats=2))
    assert (softmax["side"], diff["side"]) == ("softmax", "diff")
    assert softmax["ratio"] == 1.0
    assert diff["ratio"] == round(times["softmax"].over(times["diff"]), 4)
    low, high = diff["quartiles"]
    assert 0 < low <= diff["tokens_per_second"] <= high
    assert (diff["layers"], diff["layers_of_preset"], diff["dtype"]) == (2, 2, "float32")


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_timed_is_greedy_generation(monkeypatch, compiled):
    lively = {"tie_word_embeddings": False, "initializer_range": 0.5}  # or it repeats one token for ever
    model = pair.build_model(pair.PairSetting("debug", 2, 20, lively, tokens=3).config(), "cpu", torch.float32)
    prompt = torch.randint(0, 512, (2, 20))
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)[:, 20:]
    assert all(len(set(row)) == 4 for row in expected.tolist())
    fed, lengths = [], []

    def watched(forward):
        def step(*args, **options):
            if options.get("past_key_values") is not None and options["input_ids"].shape[1] == 1:
                fed.append(options["input_ids"])
                lengths.append(int(options["past_key_values"].get_seq_length()))
            return forward(*args, **options)

        return step

    if compiled:
        one_graph = torch.compile(model, fullgraph=True, backend="eager")
        monkeypatch.setattr(pair, "compiled_step", lambda model: watched(one_graph))
    else:
        model.forward = watched(model.forward)
    decode = pair._decoder(model, prompt, 3, compiled)
    decode()
    assert torch.equal(torch.cat(fed, dim=1), expected[:, :3])
    decode()
    assert torch.equal(torch.cat(fed[3:], dim=1), expected[:, :3])
    assert lengths == [20, 21, 22] * 2
