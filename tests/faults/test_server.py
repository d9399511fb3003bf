"""2,000 requests to the server, 64 at once, many of which are slow, broken or hostile: each gets the right answer or a
refusal in words, and the server lives on."""

import asyncio
import io
import json
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException, HTTPResponse
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="serving is an extra: pip install 'diff-transformer[serving]'")
from browser import CHROMIUM, needs_chromium
from tiny_models import save_alphabet_model

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.serving.engines import port_to_listen
from diff_transformer.serving.middleware import PROMPTS
from diff_transformer.serving.requests import PLAIN_TEMPLATE

pytestmark = pytest.mark.faults
CHAT, COMPLETIONS, RESPONSES = PROMPTS
AT_ONCE, MOST_TOKENS, SECONDS = 64, 12, 400  # the last one: for any answer
PART = "The server"
MODES = {"one by one": [], "continuous batching": ["--continuous-batching"]}
GROWTH = 64 << 20  # bytes of memory, over three quarters of the requests
ALPHABET = "abcdefghijklmnopqrstuvwxyz" * 2
HELLO = [{"role": "user", "content": "abc"}]
WRONG = {
    COMPLETIONS: [
        b"{not json", b"\xff\xfe\x00", b"", b"null", b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": "a"}}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}', {}, [], {"prompt": 3}, {"prompt": ["a"]}, {"prompt": ""},
        {"prompt": "a", "max_tokens": -1}, {"prompt": "a", "max_tokens": 10**9}, {"prompt": "a", "n": 5},
        {"prompt": "a", "stop": [""]}, {"prompt": "a", "generation_config": "{}"}, {"prompt": "a", "model": "gpt2"},
        {"prompt": "a", "seed": -1}, {"prompt": "a", "stream": "yes"}, {"prompt": "a" * 1000},
        {"prompt": "a" * 15_000_000}, {"prompt": "a" * 17_000_000},
    ],
    CHAT: [
        {}, {"messages": []}, {"messages": "a"}, {"messages": [{"role": "king", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
        {"messages": HELLO, "tools": [1]}, {"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}},
    ],
    RESPONSES: [{}, {"input": 7}, {"input": "a", "previous_response_id": "x"}, {"input": [{"role": "user"}]}],
    "/load_model": [{"model": "gpt2"}], "/reset": [{}], "/v1/../load_model": [{"model": "gpt2"}],
    "/v1/audio/transcriptions": [b"x"], "/%2e%2e/etc/passwd": [{}],
}  # fmt: skip
EVIL = [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://localhost:1"},
        {"Host": "evil.example"}, {"Host": "localhost.evil.example"}, {"Host": ""}]  # fmt: skip
NOT_HTTP = b"Invalid HTTP request received."


@dataclass
class Served:
    """A server's port, and the greedy text of a prompt alone: ``(whether it is a chat, prompt)`` -> its tokens."""

    port: int
    alone: dict[tuple[bool, str], list[int]]


def question(served: Served, draw: random.Random, **options) -> tuple[str, dict, str]:
    """A path, a body and the text that answers it."""
    path, start, tokens = draw.choice(PROMPTS), draw.randrange(26), draw.randint(1, MOST_TOKENS)
    prompt = ALPHABET[start : start + 2 + start % 5]
    text = byte_tokenizer().decode(served.alone[path != COMPLETIONS, prompt][:tokens], skip_special_tokens=True)
    given = {
        COMPLETIONS: {"prompt": prompt, "max_tokens": tokens},
        CHAT: {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens},
        RESPONSES: {"input": prompt, "max_output_tokens": tokens},
    }[path]
    return path, {"stream": draw.random() < 0.5, "temperature": 0, **given, **options}, text


def message(path: str, body: bytes | dict | list, **headers) -> bytes:
    """An HTTP request; ``headers`` replace or add to the usual ones, and None leaves one out."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    usual = {"Host": "localhost", "Connection": "close", "Content-Length": len(body)}
    lines = [f"{name}: {value}" for name, value in {**usual, **headers}.items() if value is not None]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + body


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, socket.socket]:
    """A connection that takes few bytes ahead of its reader."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    return *await asyncio.open_connection(sock=raw, limit=256), raw


async def answer(port: int, sent: bytes, *, piece: int = 1 << 30, pause: float = 0, stall: float = 0):
    """Status and body of the answer to what is sent, piece by piece; a stall follows the answer's first byte."""
    reader, writer, _ = await connect(port)
    try:
        for start in range(0, len(sent), piece):
            writer.write(sent[start : start + piece])
            await writer.drain()
            await asyncio.sleep(pause)
        raw = await reader.read(1)
        await asyncio.sleep(stall)
        while not whole(raw) and (more := await reader.read(1 << 16)):
            raw += more
        return parsed(raw)
    finally:
        writer.close()


def whole(raw: bytes) -> bool:
    """Whether this is all of an answer that says its length."""
    head, _, body = raw.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return length is not None and len(body) >= int(length[1])


def parsed(raw: bytes) -> tuple[int, bytes]:
    class Socket:
        def makefile(self, mode):
            return io.BytesIO(raw)

    response = HTTPResponse(Socket())
    response.begin()
    return response.status, response.read()


def text_of(path: str, body: bytes, stream: bool) -> str:
    """The text of an answer, whole or in pieces."""
    if not stream:
        found = json.loads(body)
        if path == RESPONSES:
            return found["output"][0]["content"][0]["text"]
        return found["choices"][0]["text"] if path == COMPLETIONS else found["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    if path == RESPONSES:
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    choices = [event["choices"][0] for event in events]
    return "".join((one["text"] if path == COMPLETIONS else one["delta"].get("content")) or "" for one in choices)


async def asks(served, draw, **how):
    path, body, text = question(served, draw)
    headers = {"X-Request-Id": "one for all"} if draw.random() < 0.3 else {}
    status, got = await answer(served.port, message(path, body, **headers), **how)
    assert status == 200, got
    assert text_of(path, got, body["stream"]) == text, (path, body, got)
    return "right answers"


async def types(served, draw):
    """Sends a request byte by byte."""
    return f"{await asks(served, draw, piece=1, pause=0.002)} to clients that type"


async def stalls(served, draw):
    return f"{await asks(served, draw, stall=1 + draw.random())} to clients that stall"


async def leaves(served, draw):
    """Closes the connection at a random moment, in half of the cases with a reset."""
    path, body, _ = question(served, draw, stream=draw.random() < 0.7)
    raw = message(path, body)
    reader, writer, connection = await connect(served.port)
    when = draw.choice(["in the request", "before the answer", "in the answer"])
    writer.write(raw[: draw.randrange(len(raw))] if when == "in the request" else raw)
    await writer.drain()
    await (reader.read(1) if when == "in the answer" else asyncio.sleep(draw.random() / 4))
    if draw.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    writer.close()
    return f"the client left {when}"


async def errs(served, draw):
    path, body = draw.choice([(path, body) for path, bodies in WRONG.items() for body in bodies])
    status, got = await answer(served.port, message(path, body, Connection="keep-alive"))
    assert status in (400, 404, 408, 413), (status, got, path, str(body)[:99])
    assert json.loads(got)["error"]["message"], got
    return "wrong requests refused in words"


async def crosses(served, draw):
    """As a page of another site would, with ``text/plain``, for which a browser does not ask first."""
    path, body, _ = question(served, draw)
    status, got = await answer(served.port, message(path, body, **{"Content-Type": "text/plain", **draw.choice(EVIL)}))
    assert status == 403, got
    assert json.loads(got)["error"]["message"], got
    return "cross-site requests refused in words"


async def babbles(served, draw):
    """Sends what is no HTTP, or lies about its length."""
    whole = message(COMPLETIONS, {"prompt": "abc", "max_tokens": 2})
    lies = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 9 + b"x" * 100_000,
        b"GET /\xff HTTP/1.1\r\n\r\n", whole.replace(b"localhost", b"localhost\r\nHost: b"),
        *(message(COMPLETIONS, b'{"prompt": "a"}', **{"Content-Length": length}) for length in (-1, "x", 5, "1e1")),
        message(COMPLETIONS, b"zz\r\n{}", **{"Content-Length": None, "Transfer-Encoding": "chunked"}),
        message(COMPLETIONS, b"{}", X="y" * 200_000), b"POST /v1/completions HTTP/1.0\r\n\r\n",
        message(COMPLETIONS, b'{"prompt": "a"}', **{"Content-Length": 99}),
    ]  # fmt: skip
    raw = draw.choice(lies)
    if raw is lies[-1]:  # waits for the rest, which does not come
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer(served.port, raw), 1)
        return "half a request: no answer yet when the client left"
    try:
        status, got = await answer(served.port, raw)
    except ConnectionResetError:  # the server closed while the client was still sending
        assert len(raw) > 1 << 16
        return "endless headers cut off"
    assert status in (400, 403), (raw[:99], got)
    assert got == NOT_HTTP or json.loads(got)["error"]["message"], got
    return "broken HTTP refused in words"


COUNTS = {asks: 1000, types: 100, stalls: 100, leaves: 250, errs: 250, crosses: 200, babbles: 100}


async def load(served: Served, kinds: list, draw: random.Random) -> Counter:
    """Outcomes of these kinds of request, ``AT_ONCE`` at once."""
    outcomes, wrong, waiting = Counter(), [], iter(kinds)

    async def client():
        for kind in waiting:
            try:
                async with asyncio.timeout(SECONDS):
                    outcomes[await kind(served, draw)] += 1
            except (AssertionError, OSError, HTTPException) as error:
                wrong.append(f"{kind.__name__}: {error!r}"[:2000])

    async with asyncio.TaskGroup() as clients:
        for _ in range(AT_ONCE):
            clients.create_task(client())
    assert not wrong, f"{len(wrong)} of {len(kinds)}: " + "\n".join(wrong[:9])
    return outcomes


def greedy(folder: Path) -> dict[tuple[bool, str], list[int]]:
    """The greedy continuation of each prompt alone, in plain text and as a chat."""
    model, tokenizer = DiffTransformerForCausalLM.from_pretrained(folder).eval(), byte_tokenizer()
    tokenizer.chat_template, alone = PLAIN_TEMPLATE, {}
    for start in range(26):
        prompt = ALPHABET[start : start + 2 + start % 5]
        chat = [{"role": "user", "content": prompt}]
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        for is_chat, ids in ((False, tokenizer(prompt, return_tensors="pt")),
                             (True, tokenizer.apply_chat_template(chat, **options))):  # fmt: skip
            found = model.generate(**ids, max_new_tokens=MOST_TOKENS, do_sample=False)
            alone[is_chat, prompt] = found[0, ids["input_ids"].shape[1] :].tolist()
    return alone


def state(pid: int) -> tuple[int, int]:
    """Resident bytes and open files of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    resident = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))
    return resident, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@contextmanager
def serving(folder: Path, said: Path, *options: str):
    """The process and port of ``diff-transformer serve``. At the end it stops with Ctrl-C; its log has no traceback."""
    port = port_to_listen("127.0.0.1")
    command = [sys.executable, "-m", "diff_transformer", "serve", str(folder), "--engine", "transformers"]
    with said.open("w") as file:
        process = subprocess.Popen([*command, "--port", str(port), *options], stdout=file, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 200
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.2)
        yield process, port
        assert process.poll() is None, said.read_text()[-5000:]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
    finally:
        process.kill()
    for word in ("Traceback", '" 500', "Exception"):
        assert word not in said.read_text(), said.read_text()[-5000:]


@pytest.mark.parametrize("mode", MODES)
def test_load(tmp_path, reliability, mode):
    folder = save_alphabet_model(tmp_path / "tiny-diff")
    alone, draw, outcomes, states = greedy(folder), random.Random(7), Counter(), []
    kinds = [kind for kind, count in COUNTS.items() for _ in range(count)]
    draw.shuffle(kinds)
    with serving(folder, tmp_path / "said", *MODES[mode]) as (process, port):
        for quarter in range(4):
            outcomes += asyncio.run(load(Served(port, alone), kinds[quarter::4], draw))
            states.append(state(process.pid))
        time.sleep(6)  # longer than an idle connection is kept
        last = asyncio.run(load(Served(port, alone), [asks] * 4, draw))
        states.append(state(process.pid))
    print(dict(outcomes), states)
    assert outcomes.total() == sum(COUNTS.values())
    assert last.total() == 4
    assert states[3][0] - states[0][0] < GROWTH
    assert states[4][1] < AT_ONCE, "connections stay open"
    reliability(PART, f"2,000 requests, 64 at once: {mode}", dict(outcomes.most_common()))


@pytest.mark.parametrize("mode", MODES)
def test_long_and_many(tmp_path, reliability, mode):
    """Requests of many or long values, of whose clients half leave at once; usual ones are answered meanwhile."""
    folder, draw, outcomes = save_alphabet_model(tmp_path / "tiny-diff"), random.Random(7), Counter()
    empty, alone = {"role": "user", "content": ""}, greedy(folder)
    values = [
        (COMPLETIONS, {"prompt": "a", "stop": [f"stop {i}" for i in range(100_000)]}),
        (COMPLETIONS, {"prompt": "a", "stop": "b" * 100_000}),
        (CHAT, {"messages": [empty] * 200_000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 200_000}]}),
        (RESPONSES, {"input": [empty] * 200_000}),
        (COMPLETIONS, {"prompt": " " * 1_000_000}),
        (COMPLETIONS, {"prompt": "a", "user": "b" * 10_000_000}),
        (COMPLETIONS, {"prompt": "a", "temperature": 1e-40, "max_tokens": 1}),
    ]
    bodies = [(path, json.dumps(body).encode()) for path, body in values]

    async def heavy(port, number):
        path, body = bodies[number % len(bodies)]
        raw = message(path, body)
        if number // len(bodies) % 2:
            _, writer, _ = await connect(port)
            writer.write(raw)
            await asyncio.sleep(0.05)
            writer.transport.abort()
            return "the client left"
        status, got = await answer(port, raw)
        assert status == 400 or (status == 200 and number % len(bodies) >= 6), (path, body[:99], got)
        return "refused in words" if status == 400 else "right answers"

    async def usual(served, done):
        while not done.is_set():
            began = time.monotonic()
            outcomes[f"{await asks(served, draw)} to usual requests meanwhile"] += 1
            assert time.monotonic() - began < 5
            await asyncio.sleep(0.1)

    async def both(port):
        done = asyncio.Event()
        probing = asyncio.create_task(usual(Served(port, alone), done))
        for start in range(0, 64, 4):
            outcomes.update(await asyncio.gather(*(heavy(port, number) for number in range(start, start + 4))))
        done.set()
        await probing

    with serving(folder, tmp_path / "said", *MODES[mode]) as (_, port):
        asyncio.run(both(port))
    reliability(PART, f"long and many values, of which half are left: {mode}", dict(outcomes))


PAGE = """<form method=post enctype=text/plain target=frame action="URL/v1/completions">
<input name='{"prompt": "abc", "x": "' value='"}'></form><iframe name=frame></iframe><img src="URL/v1/models">
<script src="URL/v1/models"></script><script>
async function attack() {
  const read = [], body = '{"prompt": "abc", "max_tokens": 2}', type = kind => ({'content-type': kind});
  for (const mode of ['cors', 'no-cors'])
    for (const [path, options] of [['models', {}], ['completions', {method: 'POST', body, headers: type('text/plain')}],
                                   ['completions', {method: 'POST', body, headers: type('application/json')}]])
      try { read.push(await (await fetch('URL/v1/' + path, {mode, ...options})).text()); } catch { }
  await new Promise(done => {
    const socket = new WebSocket('URL/v1/completions'.replace('http', 'ws'));
    socket.onopen = () => read.push('open');
    socket.onclose = done;
  });
  document.forms[0].submit();
  return read.join('');
}</script>"""


@needs_chromium
def test_a_page_of_another_site(tmp_path, reliability):
    """A page in Chromium tries to use the server, and its name is then made to lead to the server (DNS rebinding)."""
    from playwright.sync_api import sync_playwright

    site, said = tmp_path / "site", tmp_path / "said"
    site.mkdir()
    with serving(save_alphabet_model(tmp_path / "tiny-diff"), said) as (_, port):
        (site / "index.html").write_text(PAGE.replace("URL", f"http://127.0.0.1:{port}"))
        web = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site)))
        threading.Thread(target=web.serve_forever, daemon=True).start()
        with sync_playwright() as playwright:
            rules = "--host-resolver-rules=MAP evil.example 127.0.0.1"
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", rules])
            page = browser.new_page()
            for name in ("127.0.0.1", "evil.example"):
                page.goto(f"http://{name}:{web.server_port}/")
                assert page.evaluate("attack()") == ""
                page.wait_for_timeout(500)
            assert page.goto(f"http://evil.example:{port}/v1/models").status == 403
            browser.close()
        web.shutdown()
    answers = Counter(re.findall(r'"(\w+) /\S+ HTTP/1.1" (\d+)', said.read_text()))
    assert {status for _, status in answers} == {"403"}, answers
    assert answers["POST", "403"] >= 6
    reliability(
        PART,
        "a page of another site in Chromium: forms, fetch, images, scripts, WebSocket, DNS rebinding",
        {"refused (403)": answers.total()},
    )
