"""``diff-transformer serve`` with vLLM, asked by the ``openai`` client."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from engine_models import expected, prompts

CONTEXT = 256
CONCURRENT = 64


class Server:
    """The process, its address and a client."""

    def __init__(self, folder, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = ["--port", str(self.port), "--served-model-name", "mine", "--max-num-seqs", "16"]
        options += ["--max-model-len", str(CONTEXT), "--enforce-eager", "--block-size", "32", "--dtype", "float32"]
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "diff_transformer", "serve", str(folder), *options],
            stdout=log, stderr=subprocess.STDOUT, env={**environment, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=240, max_retries=0)

    def wait(self, log):
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            assert self.process.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"the server did not start\n{log.read_text()[-4000:]}")

    def complete(self, row, tokens: int = 16, **options):
        extra = {"ignore_eos": True, "return_token_ids": True, **options.pop("extra_body", {})}
        return self.client.completions.create(
            model="mine", prompt=row, max_tokens=tokens, temperature=0, extra_body=extra, **options
        )

    def running(self) -> float:
        """Requests that the engine has, by its own count."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        lines = [
            line
            for line in text.splitlines()
            if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))
        ]
        assert lines
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.fixture(scope="module")
def served(save_model, tmp_path_factory):
    model, folder = save_model(attention="diff", eos_token_id=256, pad_token_id=257)
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("w") as output:
        server = Server(folder, output)
        try:
            server.wait(log)
            yield model, server
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(timeout=60) in (0, 130, -signal.SIGINT), log.read_text()[-2000:]
        finally:
            server.process.kill()
    assert "engine: vllm; address: http://127.0.0.1:" in log.read_text()


def test_requests_at_once(served):
    """64 clients with prompts of 1 to 64 tokens get what each would get alone."""
    model, server = served
    rows = prompts(*range(1, CONCURRENT + 1))
    with ThreadPoolExecutor(CONCURRENT) as pool:
        found = [answer.choices[0].token_ids for answer in pool.map(server.complete, rows)]
    assert found == expected(model, rows, tokens=16)


def test_streaming(served):
    """The pieces of a streamed answer are the whole one; text comes as soon as it is there."""
    _, server = served
    row = prompts(30)[0]
    whole = server.complete(row, tokens=40).choices[0]
    chunks = list(server.complete(row, tokens=40, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.text
    assert [token for chunk in chunks if chunk.choices for token in chunk.choices[0].token_ids or []] == whole.token_ids
    assert len(chunks) > 5
    assert chunks[-1].usage.completion_tokens == 40


def test_stop_strings(served):
    _, server = served
    row = prompts(30)[0]
    text = server.complete(row, tokens=60).choices[0].text
    place = next(i for i in range(10, len(text)) if text[i].isascii() and text[i] not in text[:i])
    stopped = server.complete(row, tokens=60, stop=[text[place]]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[:place], "stop")


def test_log_probabilities(served):
    model, server = served
    import torch

    row = prompts(12)[0]
    choice = server.complete(row, tokens=4, logprobs=3).choices[0]
    logits = model(torch.tensor([row + choice.token_ids])).logits.log_softmax(-1)[0].detach()
    wanted = [float(logits[len(row) - 1 + i, token]) for i, token in enumerate(choice.token_ids)]
    assert choice.logprobs.token_logprobs == pytest.approx(wanted, abs=1e-4)


def test_structured_output(served):
    """A random model writes what the expression allows."""
    _, server = served
    extra = {"structured_outputs": {"regex": '\\{"found": (true|false)\\}'}, "ignore_eos": False}
    text = server.complete("Was it found?", tokens=40, extra_body=extra).choices[0].text
    assert isinstance(json.loads(text)["found"], bool)


def test_a_request_cancelled_in_the_middle(served):
    """A cancelled request frees its place at once, and others are answered."""
    model, server = served
    rows = prompts(20, 25)
    stream = server.complete(rows[0], tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 60
    while server.running() > 0:
        assert time.monotonic() < deadline, "the request still runs after its client has gone"
        time.sleep(0.1)
    assert server.complete(rows[1]).choices[0].token_ids == expected(model, rows[1:], tokens=16)[0]


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"model": "another"}, 404),
        ({"prompt": [1] * (CONTEXT + 10)}, 400),
        ({"prompt": []}, 400),
        ({"prompt": [100_000]}, 400),
        ({"max_tokens": -1}, 400),
        ({"temperature": -2.0}, 400),
        ({"top_p": 2.0}, 400),
        ({"n": 0}, 400),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, 400),
    ],
)
def test_bad_requests(served, options, status):
    """Each is refused with a message, and the server goes on."""
    _, server = served
    with pytest.raises(openai.APIStatusError) as refused:
        server.client.completions.create(**{"model": "mine", "prompt": [1, 2], "max_tokens": 4, **options})
    assert refused.value.status_code == status
    assert len(refused.value.message) > 10
    assert server.complete([1, 2], tokens=2).usage.completion_tokens == 2


def test_what_is_no_json(served):
    _, server = served
    request = urllib.request.Request(
        f"{server.url}/v1/completions", data=b"{", headers={"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 400
