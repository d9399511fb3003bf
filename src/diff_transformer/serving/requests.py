"""Checks of requests to transformers' server. Without them it answers wrong types with status 500, ignores options, and
generates past the model's positions, which ends continuous batching for all."""

import asyncio
import json
import math
import reprlib
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from diff_transformer.checks import LOWEST_TEMPERATURE
from diff_transformer.serving.middleware import PROMPTS, BadRequest, answer, read_body, replay

DEFAULT_NEW_TOKENS = 1024
MOST_STOPS = 4  # as OpenAI's API
LONGEST_STOP = 1000  # characters
_NO_STOP = [("stop", []), ("stop", "")]
# What changes nothing, and some clients send: options of these names, empty ones, and OpenAI's defaults.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "stream_options", "background"}
_EMPTY = (None, 0, "", [], {})
_SAME = {"n": 1, "best_of": 1, "tool_choice": "none", "response_format": {"type": "text"}}
# Headers that are not passed on. transformers tells requests apart by the last one: two clients that send the same id
# would get each other's answers.
_REPLACED = (b"content-length", b"content-type", b"x-request-id")
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80

StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stop = StopText | Annotated[list[StopText], Field(min_length=1, max_length=MOST_STOPS)]
Length = Annotated[int, Field(ge=1)]


class Part(BaseModel, strict=True):
    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(BaseModel, strict=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part]
    tool_calls: Annotated[list, Field(max_length=0)] | None = Field(None, exclude=True)


Messages = Annotated[list[Message], Field(min_length=1)]


class Request(BaseModel, strict=True, extra="forbid", allow_inf_nan=False):
    """What all three endpoints take. The ranges are those that OpenAI documents."""

    model: str = ""
    stream: bool = False
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    seed: int = Field(0, ge=0, lt=2**63)


class Completion(Request):
    prompt: str
    max_tokens: Length | None = None
    stop: Stop = ""


class Chat(Request):
    messages: Messages
    max_completion_tokens: Length | None = None
    max_tokens: Length | None = None
    stop: Stop = ""


class Response(Request):
    input: str | Messages
    instructions: str = ""
    max_output_tokens: Length | None = None


_REQUESTS: dict[str, type[Request]] = dict(zip(PROMPTS, (Chat, Completion, Response), strict=True))
# Names of the limit on new tokens. transformers 5.19 reads the second one of a chat, later versions the first one.
_LENGTHS = dict(
    zip(PROMPTS, (("max_completion_tokens", "max_tokens"), ("max_tokens",), ("max_output_tokens",)), strict=True)
)


class RequestChecks:
    """An ASGI application around transformers' ``app``: it passes on checked requests, and ``/v1/models`` names the
    served model, where transformers lists what the hub's cache has. A request is checked in a thread, so that a long
    one does not stop the others, and cancelled when its client leaves.

    Args:
        name: of the served model.
        count_tokens, context: as in ``checked``.
        together: with continuous batching, which ignores ``stop``.
    """

    def __init__(self, app, name: str, count_tokens: Callable[[str, dict], int], context: int, *, together: bool):
        self.app, self.count_tokens, self.context, self.together = app, count_tokens, context, together
        self.listed = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "local"}

    async def __call__(self, scope, receive, send):
        called = (scope.get("method"), scope.get("path"))
        if called == ("GET", "/v1/models"):
            return await answer(send, 200, {"object": "list", "data": [self.listed]})
        if called[0] != "POST" or called[1] not in PROMPTS:
            return await self.app(scope, receive, send)
        try:
            raw = await read_body(receive)
            request = await asyncio.to_thread(checked, called[1], raw, self.count_tokens, self.context)
            if self.together and "stop" in request:
                raise BadRequest("stop is not taken with --continuous-batching; leave out one of them", "stop")
        except BadRequest as refused:
            return await answer(send, refused.status, refused.body())
        body = json.dumps(request).encode()
        kept = [(name, value) for name, value in scope["headers"] if name not in _REPLACED]
        headers = [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {**scope, "headers": headers}
        if request["stream"]:  # then the server looks out for the client itself
            return await self.app(scope, replay(body, receive), send)
        await _while_connected(self.app, scope, body, receive, send)


async def _while_connected(app, scope, body: bytes, receive, send) -> None:
    """Run the application, and cancel it when the client disconnects."""

    async def disconnected():
        while (message := await receive())["type"] != "http.disconnect":
            pass
        return message

    leaving = asyncio.ensure_future(disconnected())
    answering = asyncio.ensure_future(app(scope, replay(body, lambda: asyncio.shield(leaving)), send))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()
    finally:
        leaving.cancel()
        answering.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


def checked(path: str, raw: bytes, count_tokens: Callable[[str, dict], int], context: int) -> dict:
    """The request in ``raw``, JSON, with a limit on the tokens to generate.

    Args:
        path: one of ``PROMPTS``.
        count_tokens: ``(path, request)`` -> tokens of the prompt.
        context: most tokens of prompt and answer together.

    Raises:
        BadRequest: with what is wrong and what is accepted.
    """
    try:
        body = json.loads(raw)
        json.dumps(body, ensure_ascii=False).encode()  # JSON may hold half a surrogate pair, and no tokenizer takes it
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is not JSON of Unicode text ({error}); send an object") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the request is {_shown(body)}; send an object")
    _refuse_many(body, context)
    schema = _REQUESTS[path]
    known = schema.model_fields.keys()
    kept = {name: value for name, value in body.items() if name in known or not _changes_nothing(name, value)}
    given = {name: value for name, value in kept.items() if value is not None and (name, value) not in _NO_STOP}
    try:
        request = schema.model_validate(given).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise _refusal(error, known) from None
    if request.get("temperature", 1) < LOWEST_TEMPERATURE:
        request["temperature"] = 0.0
    return _limited(path, request, count_tokens(path, request), context)


def _refuse_many(body: dict, context: int) -> None:
    """Refuse more messages and parts of them than the model has positions, before one is looked at."""
    for field in ("messages", "input"):
        given = body.get(field)
        messages = given if isinstance(given, list) else []
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        many = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
        if many > context:
            raise BadRequest(f"{field} has {many:,} messages and parts of them; this model takes {context:,}", field)


def _changes_nothing(name: str, value: Any) -> bool:
    return name in _IGNORED or value in _EMPTY or (name in _SAME and value == _SAME[name])


def _refusal(error: ValidationError, known) -> BadRequest:
    """The error that lies deepest in the request: of the alternatives, the one that fitted best."""
    worst = max(error.errors(), key=lambda found: (len(found["loc"]), not found["type"].endswith("_type")))
    field = str(worst["loc"][0])
    if worst["type"] == "extra_forbidden" and len(worst["loc"]) == 1:
        return BadRequest(f"{field} is not taken here; accepted: {', '.join(sorted(known))}", field)
    if worst["type"] == "missing" and len(worst["loc"]) == 1:
        return BadRequest(f"{field} is missing", field)
    inner = {*Message.model_fields, *Part.model_fields}  # pydantic also names the alternative that it tried
    place = [field, *(str(part) for part in worst["loc"][1:] if isinstance(part, int) or part in inner)]
    return BadRequest(f"{'.'.join(place)} is {_shown(worst['input'])}: {worst['msg']}", field)


def _limited(path: str, request: dict, used: int, context: int) -> dict:
    field, lengths = next(name for name in ("prompt", "input", "messages") if name in request), _LENGTHS[path]
    if used == 0:
        raise BadRequest(f"{field} has no tokens; send some text", field)
    limits = [request[name] for name in lengths if name in request]
    room = context - used
    if room < 1 or (limits and limits[0] > room):
        wanted = f" and {limits[0]} more were asked for" if limits else ""
        raise BadRequest(
            f"the prompt has {used} tokens{wanted}; this model has {context} positions for both: shorten the prompt or "
            f"lower {lengths[0]}",
            field,
        )
    return {
        "stream": False,
        **request,
        **dict.fromkeys(lengths, limits[0] if limits else min(DEFAULT_NEW_TOKENS, room)),
    }


def _shown(value: Any) -> str:
    """At most 80 characters of a value."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def give_template(tokenizer) -> None:
    """Give the tokenizer the plain template if it has none."""
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE


def count_prompt_tokens(tokenizer, path: str, request: dict, most_characters: float = math.inf) -> int:
    """Number of tokens of a checked request's prompt, as transformers' server will encode it.

    Raises:
        BadRequest: for a prompt of more than ``most_characters``: counting millions of tokens takes minutes and
            gigabytes; for messages that the model's chat template refuses.
    """
    from jinja2 import TemplateError

    field = next(name for name in ("prompt", "input", "messages") if name in request)
    given = request[field]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if request.get("instructions"):
        messages = [{"role": "system", "content": request["instructions"]}, *messages]
    plain = [{"role": message["role"], "content": _text_of(message["content"])} for message in messages]
    characters = sum(len(message["content"]) for message in plain)
    if characters > most_characters:
        raise BadRequest(
            f"the prompt has {characters:,} characters, and this model's positions hold at most {most_characters:,}: "
            "shorten it",
            field,
        )
    if field == "prompt":
        return len(tokenizer(given)["input_ids"])
    try:
        encoded = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=True, return_dict=True)
    except TemplateError as error:  # some take no system message, or want roles to alternate
        raise BadRequest(f"the model's chat template refuses these messages: {error}", field) from None
    return len(encoded["input_ids"])


def _text_of(content: str | list) -> str:
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)
