"""What stands before transformers' server: it takes only the requests that one model can answer, and says why not."""

import json
import time
from collections.abc import Callable, Sequence

from diff_transformer.serving.requests import PROMPTS, BadRequest, checked

MOST_BYTES = 16 * 2**20
_PASSED_ON = ("/health", "/docs", "/openapi.json")


class Front:
    """An ASGI application around ``app``.

    The three endpoints of ``PROMPTS`` get checked requests; ``/v1/models`` names the served model; whatever would load
    or unload models is closed.

    Args:
        names: names of the model, the one that ``app`` knows and clients are told first.
        count_tokens, context: as in ``requests.checked``.
    """

    def __init__(self, app, names: Sequence[str], count_tokens: Callable[[str, dict], int], context: int):
        self.app, self.names, self.count_tokens, self.context = app, names, count_tokens, context
        self.created = int(time.time())

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path, method = scope["path"], scope["method"]
        try:
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


async def _read(receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the client went away")
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            raise BadRequest(f"the request has more than {MOST_BYTES // 2**20} MiB", status=413)
        if not message.get("more_body"):
            return body


def _once(body: bytes, receive):
    """A receive that gives ``body`` first, then whatever the client sends next."""
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
