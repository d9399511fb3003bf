import json
import threading
import time
import urllib.error
import urllib.request

import pytest
from tiny_models import save_alphabet_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_alphabet_model(tmp_path_factory.mktemp("served") / "tiny-diff")


class Running:
    """A server on a free port of this machine, in a thread."""

    def __init__(self, server):
        self.server = server
        self.thread = threading.Thread(target=server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 60
        while not server.server.started:
            assert time.monotonic() < deadline, "the server did not start"
            assert self.thread.is_alive(), "the server ended at once"
            time.sleep(0.02)
        self.port = server.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def ask(self, path, body=None, *, raw=None, timeout=120):
        """Status and decoded JSON of the answer; GET without a body."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            return refused.code, json.loads(refused.read())

    def stop(self):
        self.server.server.should_exit = True
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()


@pytest.fixture(scope="session")
def run_server():
    """``run_server(folder, **options)`` -> ``Running``; all are stopped at the end."""
    from diff_transformer.serving.server import make_server

    running = []

    def start(folder, **options):
        running.append(Running(make_server(str(folder), port=0, device="cpu", **options)))
        return running[-1]

    yield start
    for one in running:
        one.stop()


@pytest.fixture(scope="session")
def server(run_server, model_folder):
    return run_server(model_folder)
