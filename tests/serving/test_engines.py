"""Which engine ``diff-transformer serve`` takes, and how it calls vLLM. tests/vllm runs the command with vLLM."""

import json
import re
import socket
import sys

import pytest

pytest.importorskip("pydantic", reason="serving is an extra: pip install 'diff-transformer[serving]'")
from architectures import tiny

from diff_transformer import DiffTransformerForCausalLM, differentiate
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.model.convert import convert_folder
from diff_transformer.model.loading import read_model
from diff_transformer.model.presets import preset
from diff_transformer.serving import engines
from diff_transformer.serving.requests import PLAIN_TEMPLATE


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """``installed(version)``: as if that vLLM were installed; None: none."""

    def install(version):
        folder = None if version is None else tmp_path / "vllm"
        if folder is not None:
            folder.mkdir()
            (folder / "_version.py").write_text(f"__version_tuple__ = {version}")
        monkeypatch.setattr(engines, "vllm_folder", lambda: folder)

    return install


@pytest.fixture
def save(tmp_path):
    def save(**fields):
        DiffTransformerForCausalLM(preset("debug", vocab_size=258, **fields)).save_pretrained(tmp_path / "model")
        byte_tokenizer().save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def test_auto_takes_vllm_where_it_is_installed(installed, model_folder):
    installed(None)
    assert engines.choose_engine("auto", str(model_folder)) == ("transformers", "")
    installed((0, 32, 0))
    assert engines.choose_engine("auto", str(model_folder)) == ("vllm", "")
    assert engines.choose_engine("transformers", str(model_folder)) == ("transformers", "")


def test_a_published_model_is_served_by_vllm_without_its_code(installed, save, tmp_path):
    save(lambda_depth_offset=-1)
    convert_folder(tmp_path / "model", tmp_path / "motif", target="motif")
    told = json.loads((tmp_path / "motif" / "config.json").read_text())
    auto_map = {"AutoConfig": "configuration_motif.MotifConfig", "AutoModelForCausalLM": "modeling_motif.Motif"}
    (tmp_path / "motif" / "config.json").write_text(json.dumps(told | {"auto_map": auto_map, "dtype": "bfloat16"}))
    installed((0, 32, 0))
    assert engines.choose_engine("auto", str(tmp_path / "motif")) == ("vllm", "")
    command = engines.vllm_command(str(tmp_path / "motif"), name="motif", port=0)
    assert command[command.index("--dtype") + 1] == "bfloat16"
    with pytest.raises(ValueError, match=r"its own code, .* convert it \(`diff-transformer convert` takes Motif"):
        read_model(tmp_path / "motif")
    quantised = told | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "motif" / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ValueError, match=r"motif has quantised weights \(awq\), .* serve the checkpoint that was"):
        engines.choose_engine("vllm", str(tmp_path / "motif"))
    chosen, reason = engines.choose_engine("auto", str(tmp_path / "motif"))
    assert (chosen, "quantised weights" in reason) == ("transformers", True)


@pytest.mark.parametrize(
    ("version", "fields", "options", "message"),
    [
        (None, {}, {}, r"vLLM is not installed; pip install 'diff-transformer\[vllm\]', or give --engine transformers"),
        ((0, 20, 1), {}, {}, r"needs vLLM 0.32 or newer, and this is 0.20.1; pip install 'vllm>=0.32'"),
        ((0, 32, 0), {"attention": "dint"}, {}, r"attention='dint', whose running mean .* --engine transformers"),
        ((0, 32, 0), {"head_dim": 260}, {}, r"heads of width 520 in vLLM's cache .* --engine transformers"),
        ((0, 32, 0), {}, {"attn_implementation": "sdpa"}, r"attn_implementation='sdpa' is one of transformers'"),
        (
            (0, 32, 0),
            {},
            {"device": "cuda:1"},
            r"device is 'cuda:1', and vLLM uses what it was built for; leave it out",
        ),
    ],
)
def test_what_vllm_cannot_serve_is_said_before_it_starts(installed, save, version, fields, options, message):
    """Named, it never falls back; ``auto`` takes transformers and says why, where vLLM is installed."""
    installed(version)
    folder = save(**fields)
    with pytest.raises(ValueError, match=message):
        engines.choose_engine("vllm", folder, **options)
    chosen, reason = engines.choose_engine("auto", folder, **options)
    assert chosen == "transformers"
    assert bool(reason) == (version is not None)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("Qwen3", "diff_v2", ""),
        (
            "GPT-2",
            "diff_v2",
            r"in place from a gpt2 model, which vLLM's Transformers backend is not known .*\(vLLM takes llama, ",
        ),
        (
            "Qwen3",
            "diff",
            r"in place as 'diff', each of whose maps has its own keys, .*--engine transformers`, or diff",
        ),
    ],
)
def test_a_model_made_differential_in_place(installed, tmp_path, name, kind, message):
    differentiate(tiny(name, vocab_size=258), kind).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    installed((0, 32, 0))
    chosen, reason = engines.choose_engine("auto", str(tmp_path))
    assert (chosen, bool(reason)) == ("transformers" if message else "vllm", bool(message))
    assert re.search(message, reason)


def test_folders_that_no_engine_serves(installed, save, tmp_path):
    installed((0, 32, 0))
    with pytest.raises(ValueError, match="no engine 'vlm' \\(did you mean 'vllm'"):
        engines.choose_engine("vlm", "x")
    with pytest.raises(FileNotFoundError, match="no model at /nowhere/model"):
        engines.choose_engine("vllm", "/nowhere/model")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        engines.choose_engine("vllm", str(tmp_path))
    path = tmp_path / "model" / "config.json"
    settings = json.loads((save() and path).read_text())
    path.write_text(json.dumps(settings | {"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"but its model_type is 'llama'; give a folder that save_pretrained"):
        engines.choose_engine("vllm", str(path.parent))
    coded = {"model_type": "other", "auto_map": {"AutoConfig": "code.Config"}}
    path.write_text(json.dumps(coded))
    with pytest.raises(ValueError, match=r"brings its own code, .* vllm serve .*model --trust-remote-code"):
        engines.choose_engine("vllm", str(path.parent))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"the config\.json of .* cannot be read \(.*model_type"):
        engines.choose_engine("vllm", str(path.parent))
    (path.parent / "model.safetensors").rename(path.parent / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds pytorch_model\.bin but no \.safetensors file"):
        engines.choose_engine("vllm", str(path.parent))


def test_the_command_says_the_same_to_vllm(installed, model_folder, monkeypatch, capsys):
    installed((0, 32, 0))
    called = {}
    monkeypatch.setattr(engines.os, "execve", lambda *arguments: called.update(all=arguments) or sys.exit())
    port = engines.port_to_listen("0.0.0.0")
    with pytest.raises(SystemExit):
        engines.serve(
            str(model_folder), ["--seed", "3"], host="0.0.0.0", port=port, requests_at_once=32, continuous_batching=True
        )
    program, command, environment = called["all"]
    assert program == command[0] == sys.executable
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert dict(zip(command[3::2], command[4::2], strict=True)) == {
        "--model": str(model_folder), "--served-model-name": "tiny-diff", "--host": "0.0.0.0", "--port": str(port),
        "--dtype": "float32", "--load-format": "safetensors", "--middleware": engines.GUARD, "--max-num-seqs": "32",
        "--chat-template": PLAIN_TEMPLATE, "--seed": "3",
    }  # fmt: skip
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    printed = capsys.readouterr()
    assert printed.out == "engine: vLLM; model: tiny-diff; stop with Ctrl-C\n"
    assert "there is no authentication" in printed.err
    with pytest.raises(ValueError, match=r"--seed 3: these are options of vLLM, .* \(device is 'cpu'"):
        engines.serve(str(model_folder), ["--seed", "3"], device="cpu")
    command = engines.vllm_command(str(model_folder), name="x", port=0)
    assert int(command[command.index("--port") + 1]) > 1023
    with pytest.raises(ValueError, match="no dtype 'float17'"):
        engines.vllm_command(str(model_folder), name="x", dtype="float17")


def test_a_port_in_use_is_said_before_a_model_is_read(installed, model_folder, monkeypatch):
    installed(None)
    monkeypatch.setattr("diff_transformer.serving.server.make_server", lambda *a, **k: pytest.fail("read a model"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1 cannot listen on port {port} .*give another --port, 0 for any"):
            engines.serve(str(model_folder), port=port)
    assert engines.port_to_listen("127.0.0.1", port) == port
    with pytest.raises(OSError, match="or an address of this machine as --host"):
        engines.serve(str(model_folder), host="192.0.2.1")
