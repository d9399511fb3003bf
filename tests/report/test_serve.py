"""The served report: this machine alone, its own page alone, and text as data."""

import base64
import contextlib
import hashlib
import http.client
import json
import re
import select
import signal
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from diff_transformer.cli import app
from diff_transformer.report import serve
from diff_transformer.report.page import render_page
from diff_transformer.report.prompt_maps import PromptError, UnknownModel
from diff_transformer.report.serve import LARGEST, content_policy, make_server

ATTACK = "</script><img src=x onerror=alert(1)>"


def entry(model: str, text: str) -> dict:
    """Maps of a known outcome: every token attends to the first."""
    if model != "diff-seed0":
        raise UnknownModel(f"there is no model {model!r}")
    if text == "long":
        raise PromptError("the text has 300 tokens; 256 are taken")
    if text == "break":
        raise RuntimeError("out of memory")
    tokens = list(text)
    maps = bytes(255 if k == 0 else 0 for _ in tokens for k in range(len(tokens)))
    packed = base64.b64encode(maps).decode()
    return {
        "attention": "diff", "model": model, "title": f"Typed: {text}", "tokens": tokens, "answer_span": [0, 0],
        "layers": 1, "heads": 1, "first": packed, "second": packed, "lambda": [0.5], "generated": text,
    }  # fmt: skip


@contextlib.contextmanager
def running(page: str, ask=entry):
    with make_server(page, ask) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def port():
    with running("<!doctype html><script>1</script>") as number:
        yield number


def call(port, method="POST", path="/attention", body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
    given = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    connection.request(method, path, raw, {k: v for k, v in given.items() if v is not None})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, response.headers, content


def refusal(answer):
    status, headers, content = answer
    assert headers["Content-Type"] == "application/json"
    return status, json.loads(content)["error"]


QUESTION = {"model": "diff-seed0", "text": "ab"}


def test_the_page_comes_with_a_policy_that_lets_its_own_script_run(port):
    status, headers, content = call(port, "GET", "/")
    assert (status, content) == (200, b"<!doctype html><script>1</script>")
    digest = base64.b64encode(hashlib.sha256(b"1").digest()).decode()
    policy = headers["Content-Security-Policy"]
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")


def test_a_typed_text_gives_an_example_as_the_page_holds_them(port):
    status, headers, content = call(port, body=QUESTION)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    example = json.loads(content)
    assert (example["title"], example["tokens"]) == ("Typed: ab", ["a", "b"])
    (model,) = example["models"]
    assert (model["side"], model["lambda"], model["layers"], model["heads"]) == ("diff", [0.5], 1, 1)
    assert list(base64.b64decode(model["first"])) == [255, 255, 0]  # the lower triangle


def test_hostile_text_comes_back_as_text(port):
    status, headers, content = call(port, body={**QUESTION, "text": ATTACK})
    assert status == 200
    assert json.loads(content)["models"][0]["generated"] == ATTACK
    assert headers["Content-Type"] == "application/json"
    status, words = refusal(call(port, body={"model": ATTACK, "text": "a"}))
    assert (status, words) == (404, f"there is no model {ATTACK!r}")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b"[" * 60_000, 400, "not JSON"),
        ([], 400, "lacks"),
        ({"model": "diff-seed0"}, 400, "lacks"),
        ({"model": "diff-seed0", "text": 3}, 400, "not a string"),
        ({"model": "other", "text": "a"}, 404, "no model 'other'"),
        ({"model": "diff-seed0", "text": "long"}, 422, "300 tokens"),
        ({"model": "diff-seed0", "text": "x" * LARGEST}, 413, "65,536 are taken"),
        (b"x" * 900_000, 413, "900000 bytes"),
    ],
)
def test_bad_requests_are_refused_in_words(port, body, status, said):
    got, words = refusal(call(port, body=body))
    assert (got, said in words) == (status, True), words


def test_a_failing_model_is_said_and_the_server_goes_on(port, capfd):
    assert refusal(call(port, body={**QUESTION, "text": "break"})) == (500, "the model failed: out of memory")
    assert "RuntimeError: out of memory" in capfd.readouterr().err
    assert call(port, body=QUESTION)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost:1", "", "0.0.0.0:{port}"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_another_name_for_this_machine_is_refused(port, host, method):
    path = "/" if method == "GET" else "/attention"
    status, words = refusal(call(port, method, path, QUESTION, Host=host.format(port=port)))
    assert (status, "the Host is" in words) == (403, True)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_the_names_of_this_machine_are_served(port, name):
    host = f"{name}:{port}"
    assert call(port, "GET", "/", Host=host)[0] == 200
    assert call(port, body=QUESTION, Host=host, Origin=f"http://{host.lower()}")[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "https://127.0.0.1:{port}"])
def test_another_page_may_not_ask(port, origin):
    status, words = refusal(call(port, body=QUESTION, Origin=origin.format(port=port)))
    assert (status, "a page of another site" in words) == (403, True)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_form_of_another_page_is_refused(port, kind):
    status, words = refusal(call(port, body=QUESTION, Content_Type=kind))
    assert (status, "send application/json" in words) == (415, True)


def test_other_paths_and_methods_are_refused(port):
    assert refusal(call(port, "GET", "/../results.json"))[0] == 404
    assert refusal(call(port, "POST", "/", QUESTION))[0] == 404
    assert call(port, "PUT", "/attention", QUESTION)[0] == 501
    assert refusal(call(port, "POST", body=b"", Content_Length="-1"))[0] == 411


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.168.0.2"])
def test_no_other_address_is_bound(host):
    with pytest.raises(ValueError, match=r"served on 127\.0\.0\.1 only"):
        make_server("", entry, host=host)


def test_a_taken_port_is_said(port):
    with pytest.raises(OSError, match=f"port {port} cannot be opened"):
        make_server("", entry, port=port)


def test_a_port_that_is_none_is_said(tmp_path):
    for opened in (lambda: make_server("", entry, port=99999), lambda: serve.serve_report(tmp_path, port=99999)):
        with pytest.raises(ValueError, match="port is 99999; give 0"):
            opened()


def test_the_policy_names_the_script_of_a_real_page_alone(results):
    page = render_page(results, {"models": [{"name": "diff-seed0", "seed": 0}], "tokens": 256, "bytes": 8192})
    assert len(re.findall("'sha256-", content_policy(page))) == 1
    assert '"prompt":{' in page
    assert '"prompt"' not in render_page({**results, "prompt": {"models": []}})


def test_the_command_serves_one_comparison_and_writes_no_file(tmp_path, results, monkeypatch):
    served = []
    monkeypatch.setattr(serve, "serve_report", lambda folder, port: served.append((folder, port)))
    (tmp_path / "results.json").write_text(json.dumps(results))
    run = CliRunner()
    assert run.invoke(app, ["report", str(tmp_path), "--serve", "--port", "8123"]).exit_code == 0
    assert served == [(tmp_path, 8123)]
    for wrong, said in (
        ([str(tmp_path / "results.json")], "takes the folder of one comparison"),
        ([str(tmp_path)] * 2, "takes the folder of one comparison"),
        ([str(tmp_path), "--out", "a.html"], "--serve writes no file, and --out is a.html; leave out one of them"),
    ):
        assert said in str(run.invoke(app, ["report", *wrong, "--serve"]).exception)
    assert "--out is missing" in str(run.invoke(app, ["report", str(tmp_path)]).exception)
    assert len(served) == 1


def test_ctrl_c_stops_with_exit_0(tmp_path, results):
    (tmp_path / "results.json").write_text(json.dumps(results))
    model = tmp_path / "members" / "diff-seed0" / "run" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from diff_transformer.report.serve import serve_report; serve_report({str(tmp_path)!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], 60)[0]
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found, line
        status, _, content = call(int(found[1]), "GET", "/")
        assert (status, b'"name":"diff-seed0"' in content) == (200, True)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[0].strip() == "stopped"
        assert process.returncode == 0
    finally:
        process.kill()
