"""Checks of requests: what transformers' server cannot answer is refused with a message."""

from collections.abc import Callable, Sequence
from typing import Any

PROMPTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
LENGTHS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
DEFAULT_NEW_TOKENS = 1024
_ROLES = ("system", "developer", "user", "assistant", "tool")
_RANGES = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}  # inclusive, as OpenAI documents them
_TAKEN = ("model", "stream", "temperature", "top_p", "seed", "stop")
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "stream_options", "background"}
_HIGHEST_SEED = 2**63 - 1
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class BadRequest(ValueError):
    """A refused request: the message, the HTTP status and the field at fault."""

    def __init__(self, message: str, field: str | None = None, status: int = 400):
        super().__init__(message)
        self.field, self.status = field, status

    def body(self) -> dict:
        """The error as OpenAI's clients expect it."""
        kind = "not_found_error" if self.status == 404 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.status}}


def checked(path: str, body: Any, names: Sequence[str], count_tokens: Callable[[str, dict], int], context: int) -> dict:
    """The checked request, with defaults for the model and for the most tokens to generate.

    Args:
        path: one of ``PROMPTS``. body: the decoded JSON.
        names: names of the served model, the server's own first.
        count_tokens: ``(path, body)`` -> tokens of the prompt.
        context: most tokens of prompt and answer together.

    Raises:
        BadRequest: with what is wrong and what is accepted.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the request is a JSON {_kind(body)}; send an object")
    _check_model(body.get("model"), names)
    body = _known(path, body)
    _CHECKS[path](body.get(PROMPTS[path]))
    _check_options(body)
    limit = _check_length(path, body)
    used = count_tokens(path, body)
    room = context - used
    if used == 0:
        raise BadRequest(f"{PROMPTS[path]} has no tokens; send some text", PROMPTS[path])
    if room < 1 or (limit is not None and limit > room):
        wanted = "" if limit is None else f" and {limit} more were asked for"
        raise BadRequest(
            f"the prompt has {used} tokens{wanted}; this model has {context} positions for both: shorten the prompt or "
            f"lower {LENGTHS[path][0]}",
            PROMPTS[path],
        )
    filled = {name: value for name, value in body.items() if name not in LENGTHS[path]}
    new_tokens = min(DEFAULT_NEW_TOKENS, room) if limit is None else limit
    return {"stream": False, **filled, "model": names[0], LENGTHS[path][0]: new_tokens}


def _known(path: str, body: dict) -> dict:
    """The fields that this server uses. Any other field that would change the answer is refused, unless it is empty or
    zero, as some clients send it."""
    taken = {*_TAKEN, PROMPTS[path], *LENGTHS[path]} | ({"instructions"} if path == "/v1/responses" else set())
    for name, value in body.items():
        if name in ("n", "best_of"):
            if value is not None and (value != 1 or isinstance(value, bool)):
                raise BadRequest(f"{name} is {_shown(value)}; this server gives one choice per request", name)
        elif name not in taken | _IGNORED and value not in (None, 0, "", [], {}):
            raise BadRequest(f"{name} is not taken here; accepted: {', '.join(sorted(taken))}", name)
    return {name: value for name, value in body.items() if name in taken and value is not None}


def _check_model(model: Any, names: Sequence[str]):
    if model is not None and model not in names:
        raise BadRequest(f"no model {model!r} here; this server has {names[0]!r}", "model", 404)


def _check_messages(messages: Any):
    if not isinstance(messages, list) or not messages:
        raise BadRequest(
            f"messages is {_shown(messages)}; send a list such as [{{'role': 'user', 'content': 'Hello'}}]", "messages"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise BadRequest(
                f"messages[{i}] is {_shown(message)}; it needs a role out of {', '.join(_ROLES)}", "messages"
            )
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if message.get("tool_calls"):
            raise BadRequest(
                f"messages[{i}] has tool_calls, which this model does not know; leave them out", "messages"
            )
        for part in parts:
            if not _is_text(part):
                raise BadRequest(
                    f"the content of messages[{i}] is {_shown(content)}; it must be a string, or a list of parts of "
                    "type text: this model reads text only",
                    "messages",
                )


def _is_text(part: Any) -> bool:
    kinds = ("text", "input_text", "output_text")
    return isinstance(part, dict) and part.get("type") in kinds and _is_unicode(part.get("text"))


def _is_unicode(text: Any) -> bool:
    """Whether ``text`` is a string that can be encoded. JSON can contain half a surrogate pair."""
    return isinstance(text, str) and not any("\ud800" <= char <= "\udfff" for char in text)


def _check_prompt(prompt: Any):
    if not _is_unicode(prompt):
        raise BadRequest(f"prompt is {_shown(prompt)}; send one string of Unicode text", "prompt")


def _check_input(given: Any):
    if not isinstance(given, list) and not _is_unicode(given):
        raise BadRequest(f"input is {_shown(given)}; send a string or a list of messages", "input")
    if isinstance(given, list):
        _check_messages(given)


_CHECKS = {"messages": _check_messages, "prompt": _check_prompt, "input": _check_input}
_CHECKS = {path: _CHECKS[field] for path, field in PROMPTS.items()}


def _check_options(body: dict):
    for name, (low, high) in _RANGES.items():
        value = body.get(name)
        if value is not None and not (_is_number(value) and low <= value <= high):
            raise BadRequest(f"{name} is {_shown(value)}; it must be a number from {low:g} to {high:g}", name)
    if not isinstance(body.get("stream", False), bool):
        raise BadRequest(f"stream is {_shown(body['stream'])}; it must be true or false", "stream")
    seed = body.get("seed", 0)
    if not _is_whole(seed) or not 0 <= seed <= _HIGHEST_SEED:
        raise BadRequest(f"seed is {_shown(seed)}; it must be a whole number from 0 to {_HIGHEST_SEED}", "seed")
    stop = body.get("stop", ["-"])
    texts = stop if isinstance(stop, list) else [stop]
    if not texts or not all(_is_unicode(text) and text for text in texts):
        raise BadRequest(f"stop is {_shown(stop)}; it must be a string or a list of strings", "stop")
    if not _is_unicode(body.get("instructions", "")):
        raise BadRequest(f"instructions is {_shown(body['instructions'])}; it must be a string", "instructions")


def _check_length(path: str, body: dict) -> int | None:
    for name in LENGTHS[path]:
        value = body.get(name)
        if value is None:
            continue
        if not _is_whole(value) or value < 1:
            raise BadRequest(f"{name} is {_shown(value)}; it must be a whole number, at least 1", name)
        return value
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")


def _shown(value: Any) -> str:
    """At most 80 characters of a value."""
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def give_template(tokenizer) -> bool:
    """Give the tokenizer the plain template if it has none, and return whether it had none."""
    if tokenizer.chat_template is not None:
        return False
    tokenizer.chat_template = PLAIN_TEMPLATE
    return True


def count_prompt_tokens(tokenizer, path: str, body: dict) -> int:
    """Number of tokens of a checked request's prompt, as the server will encode it."""
    if path == "/v1/completions":
        return len(tokenizer(body["prompt"])["input_ids"])
    given = body["messages"] if path == "/v1/chat/completions" else body["input"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if body.get("instructions"):
        messages = [{"role": "system", "content": body["instructions"]}, *messages]
    plain = [{"role": message["role"], "content": _text_of(message["content"])} for message in messages]
    encoded = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(encoded["input_ids"])


def _text_of(content: str | list) -> str:
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)
