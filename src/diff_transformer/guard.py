"""Whom a server of this machine answers: programs and its own pages, not pages of other sites in a browser."""

import ipaddress
import socket
from urllib.parse import urlsplit


class BadRequest(ValueError):
    """A refused request: the message, the HTTP status and the field at fault."""

    def __init__(self, message: str, field: str | None = None, status: int = 400):
        super().__init__(message)
        self.field, self.status = field, status

    def body(self) -> dict:
        """The error as OpenAI's clients expect it."""
        kind = "not_found_error" if self.status == 404 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.status}}


def check_host(host: str, reached_at: str, port: int | None = None) -> None:
    """Raise BadRequest (403) unless the header ``Host`` names this machine, where a loopback address was reached.

    A site can give its own name the address 127.0.0.1 (DNS rebinding); the browser then takes this server for the site.

    Args:
        reached_at: address of this machine at which the request arrived.
        port: that ``Host`` must name; None for any, since a proxy or a tunnel may lead here.
    """
    name, given = _split(host)
    own = is_loopback(name) or name == socket.gethostname().lower()
    if is_loopback(reached_at) and not (own and port in (None, given)):
        where = f":{port}" if port else ""
        raise BadRequest(
            f"the Host is {host[:80]!r}; a request to this machine's own address names localhost{where} or "
            f"127.0.0.1{where}",
            status=403,
        )


def check_origin(origin: str | None, host: str, relation: str | None = None, *, schemes=("http", "https")) -> None:
    """Raise BadRequest (403) for a request that a page of another site sends.

    Args:
        origin: header ``Origin``: a browser names the page's site there, but not for images, scripts and links.
        host: header ``Host``.
        relation: header ``Sec-Fetch-Site``, which says of all requests whether the page is another site's.
        schemes: of this server's own pages.
    """
    own = origin is None or origin.lower() in [f"{scheme}://{host.lower()}" for scheme in schemes]
    if not own or relation not in (None, "none", "same-origin"):
        site = repr(origin[:80]) if origin else "which the browser does not name"
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


def _split(host: str) -> tuple[str, int]:
    """Name and port of a ``Host`` header."""
    try:
        parts = urlsplit(f"//{host.lower()}")
        return parts.hostname or "", parts.port or 80
    except ValueError:
        return "", 0
