"""The endpoint on loopback: OpenAI's own client, streams, load, bad requests, the end."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

pytest.importorskip("openai", reason="serving is an extra: pip install 'diff-transformer[serving]'")
from openai import BadRequestError, OpenAI
from transformers import BloomConfig, BloomForCausalLM, ByT5Tokenizer, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.model.presets import preset
from diff_transformer.serving.server import batching, make_server

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "abc"}]
GREEDY = {"temperature": 0}
ALPHABET = "abcdefghijklmnopqrstuvwxyz" * 3


@pytest.fixture(scope="module")
def batched(run_server, model_folder):
    return run_server(model_folder, continuous_batching=True, requests_at_once=4)


@pytest.fixture
def client(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_completions(client):
    answer = client.completions.create(model="tiny-diff", prompt="abcdef", max_tokens=6, **GREEDY)
    assert answer.choices[0].text == "ghijkl"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6)
    assert answer.model.startswith("tiny-diff")


def test_a_stream_is_the_same_text_in_pieces(client):
    stream = client.completions.create(model="tiny-diff", prompt="abcdef", max_tokens=6, stream=True, **GREEDY)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == "ghijkl"
    assert len([piece for piece in pieces if piece]) > 1


def test_chat_has_a_template_although_the_tokenizer_has_none(client):
    options = {"model": "tiny-diff", "messages": HELLO, "max_tokens": 5, **GREEDY}
    answer = client.chat.completions.create(**options)
    assert answer.usage.prompt_tokens == 1 + len("user: abc\nassistant:")
    assert answer.usage.completion_tokens == 5
    stream = client.chat.completions.create(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content


def test_responses(client):
    answer = client.responses.create(model="tiny-diff", input="abc", max_output_tokens=4, **GREEDY)
    assert answer.usage.output_tokens == 4
    events = client.responses.create(model="tiny-diff", input="abc", max_output_tokens=4, stream=True, **GREEDY)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.output_text


def test_the_answer_ends_before_a_stop_string(client):
    for options in ({"stop": "j"}, {"stop": ["x", "j"], "stream": True}):
        answer = client.completions.create(model="tiny-diff", prompt="abcdef", max_tokens=9, **GREEDY, **options)
        chunks = answer if options.get("stream") else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "ghij"


def test_sampling_follows_the_temperature_and_the_seed(server):
    def text(**options):
        return server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 12, **options})[1]["choices"][0]["text"]

    assert text(temperature=2.0, seed=1) == text(temperature=2.0, seed=1)
    assert len({text(temperature=2.0, seed=seed) for seed in range(6)}) > 1
    assert {text(temperature=0.0, seed=seed) for seed in range(3)} == {ALPHABET[1:13]}


def test_models_are_the_one_that_is_served(client):
    assert [model.id for model in client.models.list()] == ["tiny-diff"]
    with pytest.raises(BadRequestError, match="Server is pinned to 'tiny-diff'; requested 'gpt-4'"):
        client.completions.create(model="gpt-4", prompt="a")


def test_many_requests_at_once(server):
    def ask(i):
        start = i % 20
        status, answer = server.ask(COMPLETIONS, {"prompt": ALPHABET[start : start + 5], "max_tokens": 5, **GREEDY})
        return status, answer["choices"][0]["text"] == ALPHABET[start + 5 : start + 10]

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(36))) == [(200, True)] * 36


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {}, 400),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400),
        (CHAT, {"messages": HELLO, "tools": [1]}, 400),
        (COMPLETIONS, {"prompt": "x" * 500}, 400),
        (COMPLETIONS, {"prompt": ""}, 400),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, 400),
        (RESPONSES, {"input": 7}, 400),
        ("/load_model", {"model": "gpt2"}, 404),
        ("/reset", {}, 404),
        ("/v1/systemone", {}, 404),
        ("/v1/audio/transcriptions", {}, 404),
        ("/v1/completions", None, 405),
        ("/nothing", None, 404),
    ],
)
def test_bad_requests_get_json_and_the_server_lives_on(server, path, body, status):
    got, answer = server.ask(path, body)
    assert got == status
    assert answer["error"]["message"]
    assert server.ask("/health") == (200, {"status": "ok"})


@pytest.mark.parametrize("raw", [b"{not json", b"\xff\xfe\x00", b"", b"[" * 100_000, b"null"])
def test_what_is_not_json_is_refused(server, raw):
    status, answer = server.ask(COMPLETIONS, raw=raw)
    assert status == 400
    assert "send an object" in answer["error"]["message"]


def test_too_much_is_refused(server, monkeypatch):
    monkeypatch.setattr("diff_transformer.serving.middleware.MOST_BYTES", 1000)
    assert server.ask(COMPLETIONS, {"prompt": "a" * 2000})[0] == 413


def test_a_prompt_of_millions_of_characters_is_refused_at_once(server):
    """To count its tokens would take minutes, in which nobody else is answered, and gigabytes."""
    began = time.monotonic()
    asked = [(COMPLETIONS, {"prompt": "a" * 10**7}), (CHAT, {"messages": [{**HELLO[0], "content": "a" * 10**7}]})]
    for path, body in [*asked, (RESPONSES, {"input": "a", "instructions": "a" * 10**7})]:
        status, answer = server.ask(path, body)
        assert status == 400
        assert "characters, and this model's positions hold at most 1,664: shorten it" in answer["error"]["message"]
    assert time.monotonic() - began < 20


LONG = [
    (COMPLETIONS, {"prompt": "a", "stop": [f"stop {i}" for i in range(100_000)]}, "List should have at most 4 items"),
    (COMPLETIONS, {"prompt": "a", "stop": "b" * 100_000}, "at most 1000 characters"),
    (COMPLETIONS, {"prompt": "a", "stop": ["b" * 100_000]}, "at most 1000 characters"),
    (CHAT, {"messages": [{"role": "user", "content": ""}] * 200_000}, "has 200,000 messages and parts of them"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 200_000}]},
        "has 200,001 messages",
    ),
    (RESPONSES, {"input": [{"role": "user", "content": ""}] * 200_000}, "input has 200,000 messages and parts of them"),
]


@pytest.mark.parametrize(("path", "body", "message"), LONG)
def test_many_and_long_values_are_refused_at_once(server, path, body, message):
    began = time.monotonic()
    status, answer = server.ask(path, body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 300
    assert time.monotonic() - began < 5  # the last ones took 7 seconds, the first one minutes


def test_stop_strings_cost_nothing_before_the_first_token(server, monkeypatch):
    """transformers compares each with each token of the vocabulary."""
    monkeypatch.setattr("transformers.generation.stopping_criteria.StopStringCriteria.__init__", None)
    body = {"prompt": "abc", "max_tokens": 9, **GREEDY}
    for stop, text in ((["no", "x" * 1000, "ghi"], "defghi"), ("fg", "defg"), ("é", "defghijkl")):
        answers = [server.ask(COMPLETIONS, {**body, "stop": stop}) for _ in range(2)]
        assert [(status, answer["choices"][0]["text"]) for status, answer in answers] == [(200, text)] * 2


def test_a_temperature_of_almost_nothing_is_greedy(server, batched):
    for one in (server, batched):
        for path, more in (
            (COMPLETIONS, {"prompt": "abc"}),
            (CHAT, {"messages": HELLO}),
            (RESPONSES, {"input": "abc"}),
        ):
            lowest, greedy = (one.ask(path, {**more, "temperature": value}) for value in (1e-40, 0))
            assert lowest[0] == greedy[0] == 200
        assert (
            one.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "temperature": 1e-40})[1]["choices"][0]["text"]
            == "def"
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_a_request_ends_when_its_client_leaves(server, batched, request, stream, together):
    one, calls = batched if together else server, []
    model = one.server._model_manager.loaded_models["tiny-diff"].model

    def wait(*_):
        calls.append(time.monotonic())
        time.sleep(0.1)

    slow = model.register_forward_pre_hook(wait)
    request.addfinalizer(slow.remove)
    body = json.dumps({"prompt": "abc", "max_tokens": 100, "stream": stream, **GREEDY}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    clients = [socket.create_connection(("127.0.0.1", one.port), timeout=30) for _ in range(1 if together else 3)]
    for client in clients:  # without batching, two of them wait for the first one
        client.sendall(head.encode() + body)
    deadline = time.monotonic() + 30
    while len(calls) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for client in clients:
        client.close()
    status, answer = one.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 3, **GREEDY})
    assert (status, answer["choices"][0]["text"]) == (200, "def")
    time.sleep(0.5)
    assert len(calls) < 40, "the model still computes what nobody waits for"


def test_a_request_that_does_not_arrive_is_given_up(server, monkeypatch):
    monkeypatch.setattr("diff_transformer.serving.middleware.MOST_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        raw.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{".encode())
        answer = b"".join(iter(partial(raw.recv, 1000), b"")).decode()  # until the server closes
    assert answer.startswith("HTTP/1.1 408")
    assert "1 bytes of the request arrived in 0.3 seconds" in answer


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}])
@pytest.mark.parametrize(("path", "data"), [(COMPLETIONS, b'{"prompt": "abc"}'), ("/v1/models", None), ("/docs", None)])
def test_pages_of_other_sites_cannot_use_the_server(server, headers, path, data):
    """A page can send text/plain without asking first, and a name of its own can be made to mean this machine."""
    request = urllib.request.Request(server.url + path, data=data, headers={"content-type": "text/plain", **headers})
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(request, timeout=30)
    assert "site" in (message := json.loads(refused.value.read())["error"]["message"]) or "this machine" in message
    own = urllib.request.Request(server.url + "/v1/models", headers={"Origin": server.url})
    assert urllib.request.urlopen(own, timeout=30).status == 200


def test_a_client_that_hangs_up_does_not_stop_the_others(server):
    body = json.dumps({"prompt": "abc", "max_tokens": 100, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        assert raw.recv(64).startswith(b"HTTP/1.1 200")
    status, answer = server.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 3, **GREEDY})
    assert (status, answer["choices"][0]["text"]) == (200, "def")


def test_an_error_inside_is_json_too(server, monkeypatch):
    loaded = server.server._model_manager.loaded_models["tiny-diff"].model

    def fail(*args, **kwargs):
        raise RuntimeError("the roof is on fire")

    monkeypatch.setattr(loaded, "generate", fail)
    status, answer = server.ask(COMPLETIONS, {"prompt": "a"})
    assert (status, answer["error"]["message"]) == (500, "RuntimeError: the roof is on fire")
    monkeypatch.undo()
    assert server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200


def test_it_listens_on_this_machine_alone(server):
    assert server.server.server.config.host == "127.0.0.1"
    assert server.server.server.servers[0].sockets[0].getsockname()[0] == "127.0.0.1"


def test_continuous_batching_answers_together_what_it_answers_alone(batched):
    def ask(i):
        length = 2 + i % 5
        body = {"prompt": ALPHABET[i : i + length], "max_tokens": 8, **GREEDY}
        status, answer = batched.ask(COMPLETIONS, body)
        return status, answer["choices"][0]["text"] == ALPHABET[i + length : i + length + 8]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(16))) == [(200, True)] * 16
    assert batched.ask(COMPLETIONS, {"prompt": "a", "max_tokens": -1})[0] == 400
    assert batched.ask(COMPLETIONS, {"prompt": "a", "stop": "c"})[0] == 400  # transformers ignores it
    assert batched.ask("/health") == (200, {"status": "ok"})


def test_a_stream_whose_answer_is_ready_at_once_ends(batched, monkeypatch):
    """transformers hands the request on before it registers who waits for the answer."""
    register = ContinuousBatchingManager.register_result_handler

    def late(*args):
        time.sleep(0.5)
        register(*args)

    monkeypatch.setattr(ContinuousBatchingManager, "register_result_handler", late)
    body = {"prompt": "abc", "max_tokens": 1, "stream": True, **GREEDY}
    request = urllib.request.Request(batched.url + COMPLETIONS, data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert '"text":"d"' in answer.read().decode()


def test_two_requests_of_the_same_id_get_their_own_answers(batched):
    def ask(i):
        body = json.dumps({"prompt": ALPHABET[i : i + 3], "max_tokens": 20, **GREEDY}).encode()
        request = urllib.request.Request(batched.url + COMPLETIONS, data=body, headers={"X-Request-Id": "mine"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["choices"][0]["text"] == ALPHABET[i + 3 : i + 23]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(16)))


def test_the_paged_cache_holds_all_requests_at_full_length():
    config = batching(context=1000, requests=16)
    assert config.num_blocks * config.page_size >= 16 * 1000
    assert config.num_blocks * config.page_size < 16 * 1100
    assert config.max_requests_per_batch == 16 <= config.max_batch_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continuous_batching": True, "attn_implementation": "diff_blockwise"}, "accepted: 'sdpa', 'eager'"),
        ({"attn_implementation": "spda"}, "Unsupported attention implementation|did you mean 'sdpa'"),
        ({"dtype": "float17"}, "float17"),
    ],
)
def test_what_cannot_be_served_is_said_at_the_start(model_folder, options, message):
    with pytest.raises(ValueError, match=message):
        make_server(str(model_folder), **options)


def test_our_own_names_of_the_attention_are_taken(model_folder):
    server = make_server(str(model_folder), port=0, device="cpu", attn_implementation="diff_blockwise")
    try:
        (loaded,) = server._model_manager.loaded_models.values()
        assert loaded.model.config._attn_implementation == "diff_blockwise"
    finally:
        server.close()


def test_a_model_s_own_defaults_of_sampling_do_not_count(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "own")
    read = GenerationConfig.from_pretrained(folder)
    read.update(do_sample=True, temperature=0.6, top_k=3, repetition_penalty=1.7)
    read.save_pretrained(folder)
    server = make_server(str(folder), port=0, device="cpu")
    try:
        (loaded,) = server._model_manager.loaded_models.values()
        used = loaded.model.generation_config
        assert (used.do_sample, used.temperature, used.top_k, used.top_p) == (True, 1.0, 0, 1.0)
        assert used.repetition_penalty in (None, 1.0)
        assert used.eos_token_id == read.eos_token_id is not None
    finally:
        server.close()


def test_a_model_that_does_not_say_how_many_positions_it_has(tmp_path):
    BloomForCausalLM(BloomConfig(vocab_size=258, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    make_server(str(tmp_path), port=0, device="cpu").close()
    with pytest.raises(ValueError, match="BloomConfig has no max_position_embeddings"):
        make_server(str(tmp_path), continuous_batching=True, attn_implementation="eager")


def test_dint_has_no_place_in_the_paged_cache(tmp_path):
    DiffTransformerForCausalLM(preset("debug", vocab_size=258, attention="dint")).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attention='dint' takes means over whole rows and has no cache"):
        make_server(str(tmp_path), continuous_batching=True)


def test_a_port_that_is_none_is_said_before_anything_is_loaded():
    with pytest.raises(ValueError, match="port is 99999; give 0"):
        make_server("/nowhere/model", port=99999)


def test_a_name_that_is_no_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError) as caught:
        make_server("nofolder")
    assert "no model called nofolder (" in str(caught.value)
    assert "give a folder written by save_pretrained, or a name on the hub" in str(caught.value)
    assert "preset" not in str(caught.value)


def test_damaged_models_are_refused(model_folder, tmp_path):
    def copy(name):
        return shutil.copytree(model_folder, tmp_path / name)

    short = copy("short")
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\."):
        make_server(str(short))
    cut = copy("cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"cut/model\.safetensors cannot be read as safetensors"):
        make_server(str(cut.parent))
    pickled = copy("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds pytorch_model\.bin but no \.safetensors file"):
        make_server(str(pickled))
    (copy("words") / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="words has no tokenizer that can be read"):
        make_server(str(tmp_path / "words"))
    slow = copy("slow")
    (slow / "tokenizer.json").unlink()
    ByT5Tokenizer().save_pretrained(slow)
    with pytest.raises(ValueError, match="ByT5Tokenizer has no fast backend"):
        make_server(str(slow))


def test_folders_that_are_no_models(model_folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="no model at /nowhere/model"):
        make_server("/nowhere/model")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        make_server(str(tmp_path))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    with pytest.raises(FileNotFoundError, match="has no tokenizer; save one into the same folder"):
        make_server(str(tmp_path))


@pytest.mark.slow
def test_the_command_answers_and_ends_with_ctrl_c(model_folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "diff_transformer",
        "serve",
        str(model_folder),
        "--port",
        str(port),
        "--name",
        "abc",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 200
        while True:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, "the server did not start"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
                    assert json.loads(answer.read())["data"][0]["id"] == "abc"
                break
            except OSError:
                time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (0, 130)
    assert "model: abc; stop with Ctrl-C" in output
    assert "Traceback" not in output
