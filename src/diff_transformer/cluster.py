"""The one way to a Ray cluster."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

from diff_transformer.checks import first_line, require_extra
from diff_transformer.errors import UserError

_CONNECT_SECONDS = 5  # for an address to accept a connection; Ray itself tries for a minute
_PATIENCE = {"RAY_NUM_REDIS_GET_RETRIES": "1", "RAY_py_gcs_connect_timeout_s": "5"}  # Ray waits two minutes by default


def connect(address: str | None = None) -> None:
    """Connect to a Ray cluster, unless this process is connected. The handler of SIGTERM, which Ray replaces, stays.

    Args:
        address: ``HOST:PORT`` of its head; "auto" or None for ``RAY_ADDRESS``, else the cluster of this machine.

    Raises:
        RuntimeError: if Ray is not installed.
        ValueError: for an address of another form.
        ConnectionError: if there is no cluster at ``address``.
    """
    require_extra("ray", "--engine ray", "ray")
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        _require_listener(address)
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return
    try:
        with _same_handler():
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "on this machine" if address == "auto" else f"at --address {address} ({first_line(error)})"
        raise ConnectionError(
            f"no Ray cluster {where}; start one with `ray start --head`, or give --address HOST:PORT"
        ) from None


def _require_listener(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host.strip("/") or "://" in address or not port.isdecimal():
        raise UserError(f"--address {address!r} is not HOST:PORT of a Ray cluster's head, as `ray start` prints it")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(
            f"nothing listens at --address {address} ({first_line(error)}); give HOST:PORT of a Ray cluster's head"
        ) from None


@contextmanager
def _same_handler() -> Generator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
