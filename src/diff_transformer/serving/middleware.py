"""What stands in front of any engine's server: requests of other sites, closed doors, and the size of a request."""

import asyncio
import json

from diff_transformer.guard import BadRequest, check_host, check_origin

MOST_BYTES = 16 * 2**20
MOST_SECONDS = 60.0  # in which a request must arrive
PROMPTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# All else is closed: some paths of transformers and of vLLM load, unload or change models.
OPEN = (*PROMPTS, "/v1/models", "/health", "/version", "/metrics", "/tokenize", "/detokenize", "/docs", "/openapi.json")


class SiteGuard:
    """An ASGI application around a server's ``app``. It has no settings, so vLLM takes it too:
    ``vllm serve FOLDER --middleware diff_transformer.serving.middleware.SiteGuard``.

    A page of another site must not use the server through its visitor's browser (``guard.py``, status 403). Paths other
    than ``OPEN`` get status 404, a body above ``MOST_BYTES`` 413, and one that needs more than ``MOST_SECONDS`` 408.
    """

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host = headers.get(b"host", "")
            check_host(host, (scope.get("server") or ("",))[0])
            check_origin(headers.get(b"origin"), host, headers.get(b"sec-fetch-site"))
            if scope["path"].rstrip("/") not in OPEN:
                raise BadRequest(f"{scope['path']} is not served; there are: {', '.join(OPEN)}", status=404)
            body = await read_body(receive)
        except BadRequest as refused:
            return await answer(send, refused.status, refused.body())
        return await self.app(scope, replay(body, receive), send)


async def read_body(receive) -> bytes:
    """The whole body of a request. Raises BadRequest if it has more than ``MOST_BYTES`` (413) or is not there after
    ``MOST_SECONDS`` (408)."""
    body = bytearray()
    try:
        async with asyncio.timeout(MOST_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise BadRequest("the client disconnected")
                body += message.get("body", b"")
                if len(body) > MOST_BYTES:
                    raise BadRequest(f"the request has more than {MOST_BYTES // 2**20} MiB", status=413)
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise BadRequest(
            f"{len(body)} bytes of the request arrived in {MOST_SECONDS:g} seconds, and not its end; send it faster",
            status=408,
        ) from None


def replay(body: bytes, receive):
    """A ``receive`` that returns ``body`` first, then the client's further messages."""
    given = False

    async def replayed():
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def answer(send, status: int, content: dict) -> None:
    """Send ``content`` as JSON."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
