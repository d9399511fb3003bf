"""Which chat endpoint judges, and what it costs.

Address, model and key come from the environment:

    DIFF_TRANSFORMER_JUDGE_URL     https://HOST/v1, or the whole address of .../chat/completions
    DIFF_TRANSFORMER_JUDGE_MODEL   the model's name there
    DIFF_TRANSFORMER_JUDGE_KEY     sent as a bearer token; may be absent for a server of one's own
"""

import math
import os
import urllib.parse
from dataclasses import dataclass, field

URL, MODEL, KEY = (f"DIFF_TRANSFORMER_JUDGE_{name}" for name in ("URL", "MODEL", "KEY"))


@dataclass(frozen=True)
class Endpoint:
    """Where to ask. ``key`` is never shown.

    Raises:
        ValueError: for an address that is not http or https, or no model.
    """

    url: str
    model: str
    key: str = field(default="", repr=False)

    def __post_init__(self):
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{URL} is not an address like https://HOST/v1")
        if parts.username or parts.password:
            raise ValueError(f"{URL} holds a user name or password; give the key in {KEY} instead")
        if not self.model:
            raise ValueError(f"{MODEL} is empty; name the model that judges")
        if any(ord(char) < 33 or ord(char) > 126 for char in self.key):
            raise ValueError(f"{KEY} holds a space, a line end or a character that no header can carry")

    @property
    def address(self) -> str:
        path = self.url.rstrip("/")
        return path if path.endswith("/chat/completions") else f"{path}/chat/completions"

    @property
    def host(self) -> str:
        return urllib.parse.urlsplit(self.url).hostname or ""


def endpoint_from_environment() -> Endpoint:
    """The endpoint that the environment names.

    Raises:
        ValueError: where the address or the model is missing, naming the variables.
    """
    missing = [name for name in (URL, MODEL) if not os.environ.get(name, "").strip()]
    if missing:
        raise ValueError(
            f"no judge endpoint: set {' and '.join(missing)} (and {KEY} where the endpoint wants a key), or choose "
            "judge=containment or judge=lm:PATH"
        )
    return Endpoint(*(os.environ.get(name, "").strip() for name in (URL, MODEL, KEY)))


@dataclass(frozen=True)
class Prices:
    """Money per million tokens, in any one currency."""

    prompt: float = 0.0
    completion: float = 0.0

    def __post_init__(self):
        for name in ("prompt", "completion"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"the price of {name} tokens is {value}; give a number that is at least 0")

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


@dataclass(frozen=True)
class Estimate:
    """What a run would send: requests, tokens, and money (0 where no prices were given)."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    money: float

    def __str__(self) -> str:
        tokens = f"{self.prompt_tokens:,} prompt and {self.completion_tokens:,} completion tokens"
        money = f", {self.money:.4g} at the given prices" if self.money else ", no prices given"
        return f"about {self.requests:,} requests with {tokens}{money}"
