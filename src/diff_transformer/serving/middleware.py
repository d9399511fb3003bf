"""What stands in front of any engine's server: requests of other sites, closed doors, and the size of a request."""

import asyncio
import ipaddress
import json
import socket
from urllib.parse import urlsplit

MOST_BYTES = 16 * 2**20
MOST_SECONDS = 60.0  # in which a request must arrive
PROMPTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# All else is closed: some paths of transformers and of vLLM load, unload or change models.
OPEN = (*PROMPTS, "/v1/models", "/health", "/version", "/metrics", "/tokenize", "/detokenize", "/docs", "/openapi.json")


class BadRequest(ValueError):
    """A refused request: the message, the HTTP status and the field at fault."""

    def __init__(self, message: str, field: str | None = None, status: int = 400):
        super().__init__(message)
        self.field, self.status = field, status

    def body(self) -> dict:
        """The error as OpenAI's clients expect it."""
        kind = "not_found_error" if self.status == 404 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.status}}


class SiteGuard:
    """An ASGI application around a server's ``app``. It has no settings, so vLLM takes it too:
    ``vllm serve FOLDER --middleware diff_transformer.serving.middleware.SiteGuard``.

    A page of another site must not use the server through its visitor's browser (``check_site``, status 403). Paths
    other than ``OPEN`` get status 404, a body above ``MOST_BYTES`` 413, and one that needs more than ``MOST_SECONDS``
    408.
    """

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            check_site(dict(scope["headers"]), (scope.get("server") or ("",))[0])
            if scope["path"].rstrip("/") not in OPEN:
                raise BadRequest(f"{scope['path']} is not served; there are: {', '.join(OPEN)}", status=404)
            body = await read_body(receive)
        except BadRequest as refused:
            return await answer(send, refused.status, refused.body())
        return await self.app(scope, replay(body, receive), send)


def check_site(headers: dict[bytes, bytes], reached_at: str) -> None:
    """Raise BadRequest (403) for a request that a page of another site sends.

    A browser names the page's site in ``Origin``. For images, scripts and links it sends no ``Origin``, and says in
    ``Sec-Fetch-Site`` whether the page is another site's. A name of the page's own that leads to this machine (DNS
    rebinding) is seen in ``Host``: what arrives at a loopback address must name one, or this machine.

    Args:
        headers: names in lower case, as in ASGI.
        reached_at: address of this machine at which the request arrived.
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if is_loopback(reached_at) and not is_loopback(_hostname(host)) and _hostname(host) != socket.gethostname().lower():
        raise BadRequest(
            f"the Host is {host[:80]!r}; a request to this machine's own address names localhost or 127.0.0.1",
            status=403,
        )
    origin, relation = headers.get(b"origin"), headers.get(b"sec-fetch-site", b"none")
    own = origin is None or origin.decode("latin-1").lower() in (f"http://{host}", f"https://{host}")
    if not own or relation not in (b"none", b"same-origin"):
        site = repr(origin[:80].decode("latin-1")) if origin else "which the browser does not name"
        raise BadRequest(
            f"the request comes from a page of another site, {site}; use a client outside the browser, or a page of "
            "this server",
            status=403,
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine alone."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _hostname(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


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
