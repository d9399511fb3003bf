"""``diff-transformer serve`` with vLLM, asked by the ``openai`` client."""

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

    def complete(self, row):
        extra = {"ignore_eos": True, "return_token_ids": True}
        return self.client.completions.create(model="mine", prompt=row, max_tokens=16, temperature=0, extra_body=extra)


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
