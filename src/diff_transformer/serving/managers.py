"""How transformers' server generates: requests stop at their ``stop`` strings, and end when their client leaves."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager


class StopStrings(StoppingCriteria):
    """Stops a single sequence once its new text holds one of ``strings``.

    transformers' own criterion first compares every string with every token of the vocabulary, character by character.

    Args:
        start: tokens of the prompt.
    """

    def __init__(self, tokenizer, strings: Sequence[str], start: int):
        self.tokenizer, self.strings, self.start = tokenizer, tuple(strings), start
        self.most = 8 + max(len(string.encode()) for string in strings)  # tokens: each has a byte or more

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Whether to stop, bool [1], after the tokens ``input_ids`` [1, T]."""
        text = self.tokenizer.decode(input_ids[0, self.start :][-self.most :])
        found = any(string in text for string in self.strings)
        return torch.full((len(input_ids),), found, device=input_ids.device)


class ClientLeft(Exception):
    """Ends the generation of an answer that nobody waits for."""


class _Watch:
    """A streamer that ends the generation when ``left`` is set; it is asked before the prompt and after each token."""

    def __init__(self):
        self.left = threading.Event()

    def put(self, value) -> None:
        if self.left.is_set():
            raise ClientLeft

    def end(self) -> None:
        pass


class OneByOne(GenerateManager):
    """One request after the other."""

    def generate_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        inputs = with_stops(inputs, processor, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        watch = _Watch()
        inputs = {**with_stops(inputs, processor, gen_config), "streamer": watch}
        answer = asyncio.ensure_future(
            super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        )
        try:
            return await asyncio.shield(answer)  # the thread that generates cannot deliver to a cancelled future
        except asyncio.CancelledError:
            watch.left.set()
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise


def with_stops(inputs, tokenizer, gen_config) -> dict:
    """``inputs`` of ``generate`` with the criterion for the ``stop_strings`` of ``gen_config``, which are taken out."""
    given, gen_config.stop_strings = gen_config.stop_strings, None
    if not given:
        return {**inputs}
    strings = [given] if isinstance(given, str) else given
    criterion = StopStrings(tokenizer, strings, inputs["input_ids"].shape[-1])
    return {**inputs, "stopping_criteria": StoppingCriteriaList([criterion])}


class Together(CBGenerateManager):
    """Continuous batching, without a race of transformers': it hands a streamed request on before it registers who
    waits for the answer. An answer that is ready in between was lost, and its client waited for ever."""

    def init_cb(self, model, gen_config):
        if self._cb is None:
            super().init_cb(model, gen_config)
            self._router()._lock = threading.RLock()  # registering takes it too

    def generate_streaming(self, *args, **kwargs):
        with self._router()._lock:  # answers are delivered under it
            return super().generate_streaming(*args, **kwargs)

    async def generate_non_streaming(self, *args, request_id: str, **kwargs):
        try:
            return await super().generate_non_streaming(*args, request_id=request_id, **kwargs)
        except asyncio.CancelledError:
            cast(Any, self._cb).cancel_request(request_id)
            raise

    def _router(self) -> Any:
        return cast(Any, self._cb).output_router
