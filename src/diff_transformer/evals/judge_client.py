"""A client of OpenAI-compatible chat endpoints that pays for no reply twice.

The environment names the endpoint:

    DIFF_TRANSFORMER_JUDGE_URL     https://HOST/v1, or the whole address of .../chat/completions
    DIFF_TRANSFORMER_JUDGE_MODEL   the model's name there
    DIFF_TRANSFORMER_JUDGE_KEY     the bearer token; a server of your own may need none

The package ``openai`` sends the requests and repeats those that fail for the moment. The key goes into the
Authorization header of requests to that address and nowhere else: not into the cache, results or messages, and not
along with a redirection. Each reply is appended to a file as it arrives, under a hash of its request, so an
interrupted run never asks again.
"""

import hashlib
import json
import math
import os
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diff_transformer.checks import require_extra, require_positive
from diff_transformer.durable import append_lines, read_lines

URL, MODEL, KEY = (f"DIFF_TRANSFORMER_JUDGE_{name}" for name in ("URL", "MODEL", "KEY"))
CHARACTERS_PER_TOKEN = 3.0  # English text has about 4; a smaller number keeps estimates high


@dataclass(frozen=True)
class Endpoint:
    """Address, model and key of a chat endpoint. ``key`` never appears in the representation.

    Raises:
        ValueError: for an address that is not http or https, or a missing model.
    """

    url: str
    model: str
    key: str = field(default="", repr=False)

    def __post_init__(self):
        try:
            parts = urllib.parse.urlsplit(self.url)
            parts.port  # noqa: B018  (raises for one that is none)
        except ValueError as error:
            raise ValueError(f"{URL} is not an address like https://HOST/v1 ({error})") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{URL} is not an address like https://HOST/v1")
        if parts.username or parts.password:
            raise ValueError(f"{URL} holds a user name or password; give the key in {KEY} instead")
        if not self.model:
            raise ValueError(f"{MODEL} is empty; name the model that judges")
        if any(ord(char) < 33 or ord(char) > 126 for char in self.key):
            raise ValueError(f"{KEY} holds a space, a line end or a character that no header can carry")

    @property
    def host(self) -> str:
        return urllib.parse.urlsplit(self.url).hostname or ""


def endpoint_from_environment() -> Endpoint:
    """The endpoint that the environment names.

    Raises:
        ValueError: if the address or the model is missing, naming the variables.
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
    """Price per million tokens, in any currency."""

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
    """What a run would send: requests, tokens, and their price (0 without given prices)."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    money: float

    def __str__(self) -> str:
        tokens = f"{self.prompt_tokens:,} prompt and {self.completion_tokens:,} completion tokens"
        money = f", {self.money:.4g} at the given prices" if self.money else ", no prices given"
        return f"about {self.requests:,} requests with {tokens}{money}"


class JudgeError(RuntimeError):
    """The endpoint refuses requests or did not recover. Replies received so far are kept."""


class ChatClient:
    """Sends requests to one endpoint, one at a time.

    Args:
        endpoint: from ``endpoint_from_environment``.
        cache: file of replies; None keeps them in memory.
        options: fields of the request body besides model and messages.
        requests_per_minute: rate limit; 0 for none.
        timeout: seconds to wait for a reply.
        tries: requests per reply, including the first.
        prices: for ``spent``.
        max_cost: raise ``JudgeError`` once this client has spent this much; None for no limit.
        sleep, clock: replacements for those of ``time``, for the rate limit.

    Raises:
        RuntimeError: if the package ``openai`` is not installed, naming the extra that installs it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        cache: Path | None = None,
        options: dict | None = None,
        requests_per_minute: float = 0.0,
        timeout: float = 60.0,
        tries: int = 6,
        prices: Prices | None = None,
        max_cost: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        require_positive(timeout=timeout, tries=tries)
        if requests_per_minute < 0:
            raise ValueError(f"requests_per_minute is {requests_per_minute}; give 0 for no limit, or a positive number")
        self.endpoint, self.cache = endpoint, cache
        entries = read_lines(cache) if cache is not None else []
        self.replies = {entry["key"]: entry["reply"] for entry in entries if {"key", "reply"} <= entry.keys()}
        self.options = {"temperature": 0, "max_tokens": 16} if options is None else options
        self.interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self.timeout, self.tries = timeout, tries
        self.prices, self.max_cost = prices or Prices(), max_cost
        self.sleep, self.clock = sleep, clock
        self.prompt_tokens, self.completion_tokens = 0, 0
        self._next_start = -math.inf
        self._client = self._connect()

    @property
    def spent(self) -> float:
        """Price of the replies received so far."""
        return self.prices.of(self.prompt_tokens, self.completion_tokens)

    def reply(self, prompt: str, attempt: int = 0) -> str:
        """Text of the reply to ``prompt``, from the cache or the endpoint; empty if the reply has no text.

        Args:
            attempt: number of the attempt. Each attempt is a separate request with its own cached reply.

        Raises:
            JudgeError: if the endpoint refuses or does not recover within ``tries`` requests, or ``max_cost`` is spent.
        """
        body = {"model": self.endpoint.model, "messages": [{"role": "user", "content": prompt}], **self.options}
        asked = [self.endpoint.url, body, attempt]
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        if key not in self.replies:
            if self.max_cost is not None and self.spent >= self.max_cost > 0:
                raise JudgeError(
                    f"{self.spent:.4g} of max_cost {self.max_cost:g} is spent; raise max_cost and start again: the "
                    "replies so far are in the cache"
                )
            text, usage = self._ask(body, prompt)
            self.prompt_tokens += usage[0]
            self.completion_tokens += usage[1]
            self.replies[key] = text = self._without_key(text)
            details = {"model": self.endpoint.model, "prompt_tokens": usage[0], "completion_tokens": usage[1]}
            if self.cache is not None:
                append_lines(self.cache, [{"key": key, "reply": text, **details}])
        return self.replies[key]

    def estimate(self, prompt_characters: list[int]) -> Estimate:
        """Cost of prompts of these lengths, if each is sent once and answered at full length."""
        prompts = sum(math.ceil(length / CHARACTERS_PER_TOKEN) for length in prompt_characters)
        limits = (self.options.get(name) for name in ("max_tokens", "max_completion_tokens"))
        each = next((limit for limit in limits if isinstance(limit, int)), 1024)
        requests = len(prompt_characters)
        return Estimate(requests, prompts, requests * each, self.prices.of(prompts, requests * each))

    def _connect(self) -> Any:
        require_extra("judge", "a judge endpoint", "openai")
        import openai

        return openai.OpenAI(
            base_url=self.endpoint.url.rstrip("/").removesuffix("/chat/completions"),
            api_key=self.endpoint.key or "none",
            timeout=self.timeout,
            max_retries=self.tries - 1,
            http_client=openai.DefaultHttpxClient(follow_redirects=False),
        )

    def _ask(self, body: dict, prompt: str) -> tuple[str, tuple[int, int]]:
        import openai

        self._keep_the_rate()
        unsent = ("OpenAI-Organization", "OpenAI-Project")  # what the package takes from the environment
        try:
            raw = self._client.chat.completions.with_raw_response.create(
                model=body["model"],
                messages=body["messages"],
                extra_body=self.options,
                extra_headers={name: openai.Omit() for name in unsent},
            )
            return _read(raw.content, prompt)
        except openai.APIStatusError as error:
            said = error.response.text
            if error.status_code == 400 and "content_filter" in said:
                return "", (0, 0)
            failure = _refusal(error.status_code, " ".join(said.split())[:300], self.tries)
        except openai.APITimeoutError:
            failure = f"gave no answer in up to {self.tries} tries: no reply within {self.timeout:g} s"
        except openai.APIConnectionError as error:
            failure = f"gave no answer in up to {self.tries} tries: {error.__cause__ or error}"
        except _Malformed as error:
            failure = f"sends what is no reply of a chat endpoint: {error}; check {URL}"
        kept = "replies so far are kept; run again with --resume"
        raise JudgeError(self._without_key(f"{self.endpoint.host} {failure}; {kept}"))

    def _keep_the_rate(self) -> None:
        now = self.clock()
        if now < self._next_start:
            self.sleep(self._next_start - now)
        self._next_start = max(now, self._next_start) + self.interval

    def _without_key(self, text: str) -> str:
        return text.replace(self.endpoint.key, "[key]") if self.endpoint.key else text


class _Malformed(Exception):
    """A reply of status 200 that does not have the form of a chat completion."""


def _refusal(status: int, said: str, tries: int) -> str:
    """What to say of an error of status ``status``, which the package has repeated where that could help."""
    if 300 <= status < 400:
        return f"redirects; set {URL} to the address it redirects to"
    if status in (408, 409, 429) or status >= 500:
        return f"gave no answer in up to {tries} tries: HTTP {status}: {said}"
    hint = f"check {KEY}" if status in (401, 403) else f"check {URL} and {MODEL}, and judge_options"
    return f"refuses: HTTP {status}: {said}; {hint}"


def _read(data: bytes, prompt: str) -> tuple[str, tuple[int, int]]:
    """(text, (prompt tokens, completion tokens)) of a reply. Tokens are estimated if the reply does not count them."""
    try:
        reply = json.loads(data)
        text = reply["choices"][0]["message"].get("content") or ""
        if not isinstance(text, str):
            raise TypeError
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _Malformed(repr(" ".join(data[:200].decode("utf-8", "replace").split()))) from None
    counted = reply.get("usage")
    counted = counted if isinstance(counted, dict) else {}
    estimates = {"prompt_tokens": len(prompt), "completion_tokens": len(text)}
    tokens = [_count(counted.get(name), math.ceil(n / CHARACTERS_PER_TOKEN)) for name, n in estimates.items()]
    return text, (tokens[0], tokens[1])


def _count(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise
