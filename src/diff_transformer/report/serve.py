"""Serve the report over HTTP on this machine only, with attention maps of typed texts by the comparison's models.

``GET /`` returns the page. ``POST /attention`` takes ``{"model": NAME, "text": TEXT}`` and returns one example in the
page's format: ``{"title", "tokens", "models": [...]}``. A refused request gets JSON, ``{"error": WORDS}``.
"""

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from diff_transformer.checks import require_port
from diff_transformer.guard import BadRequest, check_host, check_origin
from diff_transformer.report.comparison import load_comparison
from diff_transformer.report.explorer import packed_examples
from diff_transformer.report.load import ResultsError
from diff_transformer.report.page import render_page, require_installed
from diff_transformer.report.prompt_maps import BYTES, TOKENS, PromptError, TypedPrompts, UnknownModel

LOOPBACK = "127.0.0.1"
LARGEST = 8 * BYTES  # largest request in bytes: JSON may write a byte of text as six
_DRAINED = 1 << 20  # bytes of a refused request that are read, so that the sender receives the answer
Ask = Callable[[str, str], dict]


def serve_report(folder: Path | str, *, port: int = 0) -> None:
    """Serve the page of the comparison in ``folder`` on 127.0.0.1 until Ctrl-C, and print its address.

    Args:
        folder: a folder that ``compare`` wrote, with results.json and the models.
        port: 0 for any free port.

    Raises:
        ResultsError: if the folder holds no finished comparison.
        FileNotFoundError: if it holds no models.
        ValueError: for a port above 65535.
        OSError: if the port cannot be opened.
        RuntimeError: without the extra ``report``.
    """
    require_port(port)
    require_installed()
    prompts = TypedPrompts(folder)
    known = [{"name": m.name, "seed": m.seed} for m in prompts.members.values()]
    page = render_page(load_comparison(folder), {"models": known, "tokens": TOKENS, "bytes": BYTES})
    with make_server(page, prompts.entry, port=port) as server:
        print(f"report: http://{LOOPBACK}:{server.server_port}/ (this machine only); stop with Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nstopped")


def make_server(page: str, ask: Ask, *, port: int = 0, host: str = LOOPBACK) -> ThreadingHTTPServer:
    """A server of ``page`` and of ``ask(model, text)``, which returns an explorer entry. It handles one text at a time.

    Raises:
        ValueError: for any host but 127.0.0.1, because the server has no password; for a port above 65535.
        OSError: if the port cannot be opened.
    """
    if host != LOOPBACK:
        raise ValueError(
            f"host is {host!r}; the report is served on {LOOPBACK} only, without a password. From another machine, "
            f"forward the port: ssh -L {port or 8000}:{LOOPBACK}:{port or 8000} MACHINE"
        )
    require_port(port)
    shown, policy, one_at_a_time = page.encode("utf-8"), content_policy(page), threading.Lock()

    class Handler(_Handler):
        def page(self) -> tuple[bytes, str]:
            return shown, policy

        def ask(self, model: str, text: str) -> dict:
            with one_at_a_time:
                entry = ask(model, text)
            (example,) = packed_examples([entry])
            return example

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise OSError(
            f"port {port} cannot be opened ({error.strerror}); give another, or 0 for any that is free"
        ) from None
    server.daemon_threads = True
    return server


def content_policy(page: str) -> str:
    """A Content-Security-Policy that allows the page's own scripts only."""
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds without a byte
    server_version, sys_version = "diff-transformer", ""
    taken = False  # whether the body was read

    def page(self) -> tuple[bytes, str]:
        raise NotImplementedError

    def ask(self, model: str, text: str) -> dict:
        raise NotImplementedError

    def do_GET(self):
        self._answer(self._get)

    def do_POST(self):
        self._answer(self._post)

    def _get(self) -> tuple[bytes, str]:
        if self.path not in ("/", "/index.html"):
            raise BadRequest(f"there is nothing at {self.path[:80]!r}; the report is at /", status=404)
        return self.page()[0], "text/html; charset=utf-8"

    def _post(self) -> tuple[bytes, str]:
        if self.path != "/attention":
            raise BadRequest(f"nothing is taken at {self.path[:80]!r}; POST /attention takes a text", status=404)
        check_origin(self.headers.get("Origin"), self.headers["Host"], schemes=("http",))
        if self.headers.get_content_type() != "application/json":
            raise BadRequest(f"the request is {self.headers.get_content_type()}; send application/json", status=415)
        body, self.taken = self.rfile.read(self._length()), True
        model, text = _question(body)
        try:
            example = self.ask(model, text)
        except UnknownModel as error:
            raise BadRequest(str(error), status=404) from None
        except (PromptError, ResultsError) as error:
            raise BadRequest(str(error), status=422) from None
        return json.dumps(example).encode("ascii"), "application/json"

    def _length(self) -> int:
        given = self.headers.get("Content-Length", "")
        if not (given.isascii() and given.isdigit()):
            raise BadRequest("the request does not say how long it is; send Content-Length", status=411)
        if len(given) > 9 or int(given) > LARGEST:
            raise BadRequest(
                f"the request has {given[:20]} bytes; {LARGEST:,} are taken, {BYTES:,} of them text", status=413
            )
        return int(given)

    def _drain(self) -> None:
        given = self.headers.get("Content-Length", "")
        if not self.taken and given.isascii() and given.isdigit() and len(given) < 10:
            self.rfile.read(min(int(given), _DRAINED))

    def _answer(self, work: Callable[[], tuple[bytes, str]]) -> None:
        status = 200
        try:
            check_host(self.headers.get("Host", ""), *self.connection.getsockname()[:2])
            body, kind = work()
        except BadRequest as refusal:
            self._drain()
            status, body, kind = refusal.status, _error(str(refusal)), "application/json"
        except TimeoutError:
            status, body, kind = 408, _error("the request did not arrive in time"), "application/json"
        except Exception as error:
            print(f"{self.path}: {type(error).__name__}: {error}", file=sys.stderr)
            status, body, kind = 500, _error(f"the model failed: {error}"), "application/json"
        self.close_connection = True
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": self.page()[1],
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
            "Connection": "close",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, so that typed texts do not appear in the terminal."""


def _question(body: bytes) -> tuple[str, str]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest('the request is not JSON; send {"model": NAME, "text": TEXT}') from None
    model, text = (given.get(key) if isinstance(given, dict) else None for key in ("model", "text"))
    if not isinstance(model, str) or not isinstance(text, str):
        raise BadRequest('the request lacks "model" or "text", or one of them is not a string; send both as strings')
    return model, text


def _error(words: str) -> bytes:
    return json.dumps({"error": words}).encode("ascii")
