"""``diff-transformer serve``: the engine, its options, one real server of transformers, mistakes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
from command_line import cli

from diff_transformer.serving import serve as serving

DOCS = Path(__file__).parents[2] / "docs"


def test_transformers_serves_a_model_of_this_package(model_folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "diff_transformer", "serve", str(model_folder), "--engine", "transformers"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline() + process.stdout.readline()
        assert f"address: http://127.0.0.1:{port}/v1" in said
        assert f'"model": "{model_folder}", "prompt"' in said
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        answer, deadline = None, time.monotonic() + 120
        while answer is None:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            try:
                answer = client.completions.create(
                    model=str(model_folder), prompt="abcdef", max_tokens=6, temperature=0
                )
            except openai.APIConnectionError:
                time.sleep(0.2)
        assert answer.choices[0].text == "ghijkl"
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    finally:
        process.kill()


@pytest.fixture
def started(monkeypatch):
    """The command that takes this process's place."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    monkeypatch.setattr(serving, "serve_with_transformers", lambda path, options: commands.append([path, *options]))
    monkeypatch.setattr(serving, "find_spec", lambda name: True)
    return commands


def test_vllm_gets_all_further_options(started, model_folder):
    cli("serve", model_folder, "--tensor-parallel-size", 2, "--port=81", "--served-model-name", "mine")
    (command,) = started
    assert command[1:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model"]
    options = ["--tensor-parallel-size", "2", "--port=81", "--served-model-name", "mine"]
    assert command[4:] == [str(model_folder), "--host", "127.0.0.1", "--port", "8000", *options]


def test_the_request_to_try_has_the_address_and_the_name(model_folder, started):
    said = cli("serve", model_folder, "--host", "0.0.0.0", "--port=81", "--served-model-name", "mine").stdout
    assert "engine: vllm; address: http://0.0.0.0:81/v1; stop with Ctrl-C" in said
    assert "curl http://0.0.0.0:81/v1/completions" in said
    assert '"model": "mine"' in said


def test_a_file_of_options_keeps_its_address(model_folder, started):
    assert "address: that of a.yaml" in cli("serve", model_folder, "--config", "a.yaml").stdout
    assert started[0][5:] == ["--config", "a.yaml"]


@pytest.mark.parametrize("installed", [(), ("vllm",), ("fastapi",), ("vllm", "fastapi")])
def test_auto_takes_vllm_where_it_is_installed(monkeypatch, started, model_folder, installed):
    monkeypatch.setattr(serving, "find_spec", lambda name: name in installed or None)
    done = cli("serve", model_folder)
    if not installed:
        assert done.returncode == 2
        assert (
            done.stderr
            == "error: transformers cannot serve here; install it: pip install 'diff-transformer[serving]'\n"
        )
    else:
        assert ("vllm.entrypoints.openai.api_server" in started[0]) is ("vllm" in installed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("/nowhere/model",), "error: /nowhere/model has no config.json; give the folder of a saved model"),
        (("no/such-model",), "error: no model 'no/such-model' ("),
        (("FOLDER", "--engine", "llama.cpp"), "error: engine is 'llama.cpp'; give auto, vllm, transformers\n"),
    ],
)
def test_mistakes_are_one_sentence(started, model_folder, words, said):
    done = cli("serve", *(str(model_folder) if word == "FOLDER" else word for word in words))
    assert done.returncode == 2
    assert done.stderr.startswith(said)
