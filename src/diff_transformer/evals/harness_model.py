"""Models as lm-evaluation-harness wants them."""

from collections.abc import Callable
from typing import Any

from diff_transformer.evals.likelihood import max_positions

CHUNK = 256  # requests between two steps of the progress bar


def harness_model(lm):
    """``lm`` as the harness wants it; a model that is one of the harness's already stays what it is.

    Its ``cuts(context, continuation)`` says whether the model has too few positions for both; ``step(done, total)`` is
    called as requests are done.
    """
    from lm_eval.api.model import LM
    from lm_eval.models.huggingface import HFLM

    if isinstance(lm, LM):
        return _with_defaults(lm)

    class Adapter(HFLM):
        step: Callable[[int, int], None] = staticmethod(_nothing)

        def loglikelihood(self, requests, disable_tqdm: bool = False):
            """In chunks of like length, so that a bar can move and padding stays small."""
            for request in requests:
                tokens = len(self.tok_encode(request.args[1]))
                if tokens > self.max_length:
                    raise ValueError(
                        f"a choice has {tokens} tokens, more than the {self.max_length} positions of {lm.name}; give a "
                        "model with more positions"
                    )
            order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i].args)))
            found: list[Any] = [None] * len(requests)
            for start in range(0, len(order), CHUNK):
                part = order[start : start + CHUNK]
                for i, value in zip(part, super().loglikelihood([requests[i] for i in part], True), strict=True):
                    found[i] = value
                self.step(start + len(part), len(order))
            return found

        def cuts(self, context: str, continuation: str) -> bool:
            return len(self.tok_encode(context + continuation)) > self.max_length + 1

    return Adapter(
        pretrained=lm.model, tokenizer=lm.tokenizer, backend="causal", batch_size=lm.batch_size,
        max_length=max_positions(lm),
    )  # fmt: skip


def _with_defaults(model):
    for name, default in (("step", _nothing), ("cuts", lambda context, continuation: False)):
        if not hasattr(model, name):
            setattr(model, name, default)
    return model


def _nothing(*_: object) -> None:
    pass
