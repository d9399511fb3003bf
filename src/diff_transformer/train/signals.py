"""Requests to stop: Ctrl-C from a person, SIGTERM from a scheduler."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop and has saved its state. ``number`` is the signal."""

    def __init__(self, message: str = "", number: int = signal.SIGINT):
        super().__init__(message)
        self.number = number

    @property
    def exit_code(self) -> int:
        """0 after SIGTERM, which tells a scheduler that all is well; 130 after Ctrl-C, as in a shell."""
        return 0 if self.number == signal.SIGTERM else 130


class Stopped(KeyboardInterrupt):
    """SIGTERM reached a process outside the steps of a run, so that nothing was saved."""

    number = signal.SIGTERM
    exit_code = 128 + signal.SIGTERM


class StopRequest:
    """A flag that a signal sets: ``if stop(): ...``; ``number`` is the signal."""

    number: int | None = None

    def __call__(self) -> bool:
        return self.number is not None


@contextmanager
def stop_requests() -> Generator[StopRequest]:
    """Context in which Ctrl-C and SIGTERM set the yielded ``StopRequest`` instead of stopping the process.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """
    stop = StopRequest()

    def request(number, frame):
        if stop() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.number = stop.number or number

    with _handlers(request, signal.SIGINT, signal.SIGTERM):
        yield stop


@contextmanager
def sigterm_interrupts() -> Generator[None]:
    """Context in which SIGTERM raises ``Stopped``, as Ctrl-C raises KeyboardInterrupt."""

    def interrupt(number, frame):
        raise Stopped

    with _handlers(interrupt, signal.SIGTERM):
        yield


@contextmanager
def _handlers(handler, *numbers: signal.Signals) -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():  # where signals cannot be caught
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
