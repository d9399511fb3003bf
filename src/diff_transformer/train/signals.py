"""Being asked to stop: Ctrl-C by a person, SIGTERM by a scheduler that wants the machine back."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop and has saved its state. ``number`` is the signal that asked."""

    def __init__(self, message: str = "", number: int = signal.SIGINT):
        super().__init__(message)
        self.number = number

    @property
    def exit_code(self) -> int:
        """0 after SIGTERM, by which a scheduler knows that all is well; 130 after Ctrl-C, as in a shell."""
        return 0 if self.number == signal.SIGTERM else 130


class Stopped(KeyboardInterrupt):
    """SIGTERM reached a process that was not at the steps of a run, and so saved nothing in answer."""

    number = signal.SIGTERM
    exit_code = 128 + signal.SIGTERM


def once_saved(stopped: KeyboardInterrupt, saved: bool, how: str) -> KeyboardInterrupt:
    """What the driver of several runs raises when it was stopped: ``Interrupted``, where a run's state is ``saved``,
    saying ``how`` to go on; else what stopped it."""
    number = getattr(stopped, "number", signal.SIGINT)
    return Interrupted(f"stopped, state saved; {how}", number) if saved else stopped


class StopRequest:
    """Whether someone asked to stop, and by which signal: asked between steps, ``if stop(): ...``."""

    number: int | None = None

    def __call__(self) -> bool:
        return self.number is not None


@contextmanager
def stop_requests() -> Generator[StopRequest]:
    """Turn Ctrl-C and SIGTERM into a question. A second Ctrl-C stops at once; a second SIGTERM changes nothing.

    Outside the main thread signals cannot be caught, and the answer is always no.
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
    """Let SIGTERM raise ``Stopped``, as Ctrl-C raises KeyboardInterrupt."""

    def interrupt(number, frame):
        raise Stopped

    with _handlers(interrupt, signal.SIGTERM):
        yield


@contextmanager
def _handlers(handler, *numbers: signal.Signals) -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
