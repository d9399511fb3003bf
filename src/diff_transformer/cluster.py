"""The one way to a Ray cluster."""

import logging
import signal
import threading

from diff_transformer.checks import first_line, require_extra
from diff_transformer.errors import UserError


def connect(address: str | None = None) -> None:
    """Connect to a Ray cluster, unless this process is connected. The handler of SIGTERM, which Ray replaces, stays.

    Args:
        address: ``HOST:PORT`` of its head; "auto" or None for ``RAY_ADDRESS``, else the cluster of this machine.

    Raises:
        UserError: if Ray is not installed, or there is no cluster at ``address``, which Ray tries for some minutes.
    """
    require_extra("ray", "--engine ray", "ray")
    import ray

    if ray.is_initialized():
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"no Ray cluster at {address or 'auto'} ({first_line(error)}); start one with `ray start --head`, or give "
            "--address HOST:PORT"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
