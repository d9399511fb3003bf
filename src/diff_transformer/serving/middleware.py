"""Checks in front of transformers' server. They refuse what it cannot answer, and requests from other sites."""

import ipaddress
import json
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from diff_transformer.serving.requests import PROMPTS, BadRequest, checked

MOST_BYTES = 16 * 2**20
_PASSED_ON = ("/health", "/docs", "/openapi.json")


class RequestChecks:
    """An ASGI application around ``app``.

    The three endpoints of ``PROMPTS`` get checked requests, ``/v1/models`` names the served model, and the endpoints
    that load or unload models are closed.

    A page of another site must not use the server through its visitor's browser. A request with an ``Origin`` other
    than the server's own is refused. A server on loopback also refuses a ``Host`` that is not a name of this machine,
    which stops DNS rebinding.

    Args:
        names: names of the model; ``app`` and clients know it by the first.
        count_tokens, context: as in ``requests.checked``.
        host: address that the server listens on.
    """

    def __init__(self, app, names: Sequence[str], count_tokens: Callable[[str, dict], int], context: int, *, host: str):
        self.app, self.names, self.count_tokens, self.context = app, names, count_tokens, context
        self.host = host
        self.created = int(time.time())

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path, method = scope["path"], scope["method"]
        try:
            check_site(dict(scope["headers"]), self.host)
            if path in PROMPTS and method == "POST":
                body = json.dumps(self._checked(path, await _read(receive))).encode()
                return await self.app(_with_length(scope, body), _once(body, receive), send)
            if path == "/v1/models" and method == "GET":
                return await _answer(send, 200, {"object": "list", "data": [self._model()]})
            if path in _PASSED_ON:
                return await self.app(scope, receive, send)
            known = path in PROMPTS or path == "/v1/models"
            raise BadRequest(
                f"{method} {path} is not served; there are: POST {', '.join(PROMPTS)}, GET /v1/models, GET /health",
                status=405 if known else 404,
            )
        except BadRequest as refused:
            return await _answer(send, refused.status, refused.body())

    def _checked(self, path: str, raw: bytes) -> dict:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the request is not JSON ({error}); send an object") from None
        return checked(path, body, self.names, self.count_tokens, self.context)

    def _model(self) -> dict:
        return {"id": self.names[0], "object": "model", "created": self.created, "owned_by": "local"}


def check_site(headers: dict[bytes, bytes], listens_on: str) -> None:
    """Raise BadRequest (403) for a request that a page of another site sends.

    Args:
        headers: names in lower case, as in ASGI.
        listens_on: address of the server.
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if is_loopback(listens_on) and not is_loopback(_hostname(host)) and _hostname(host) != listens_on.lower():
        raise BadRequest(
            f"the Host is {host[:80]!r}; this server answers on this machine only, as localhost or 127.0.0.1",
            status=403,
        )
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower() not in (f"http://{host}", f"https://{host}"):
        raise BadRequest(
            f"the request comes from a page of another site, {origin[:80].decode('latin-1')!r}; use a client outside "
            "the browser, or a page of this server",
            status=403,
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine alone."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hostname(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def _read(receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the client disconnected")
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            raise BadRequest(f"the request has more than {MOST_BYTES // 2**20} MiB", status=413)
        if not message.get("more_body"):
            return body


def _once(body: bytes, receive):
    """A ``receive`` that returns ``body`` first, then the client's further messages."""
    given = False

    async def replay():
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _with_length(scope: dict, body: bytes) -> dict:
    kept = [(name, value) for name, value in scope["headers"] if name not in (b"content-length", b"content-type")]
    return {
        **scope,
        "headers": [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }


async def _answer(send, status: int, content: dict):
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
