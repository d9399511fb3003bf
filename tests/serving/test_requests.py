"""What is refused, in words, without a server or a model."""

import asyncio
import json
import socket
import time

import pytest

pytest.importorskip("pydantic", reason="serving is an extra: pip install 'diff-transformer[serving]'")
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.guard import BadRequest, check_host, check_origin
from diff_transformer.serving.middleware import SiteGuard
from diff_transformer.serving.requests import DEFAULT_NEW_TOKENS, RequestChecks, checked, count_prompt_tokens

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def check(path, body, context=64, used=10):
    return checked(path, json.dumps(body).encode(), lambda path, body: used, context)


def test_a_plain_request_is_filled_in():
    both = {"max_completion_tokens": 54, "max_tokens": 54}
    assert check(CHAT, {"messages": HELLO}) == {"messages": HELLO, "stream": False, **both}
    for name in both:
        asked = check(CHAT, {"messages": HELLO, name: 7})
        assert [asked[limit] for limit in both] == [7, 7]
    asked = {"prompt": "a", "max_tokens": 5, "model": "tiny", "stream": True, "stop": ["\n"], "temperature": 0}
    assert check(COMPLETIONS, asked) == asked
    assert (
        check(RESPONSES, {"input": "a", "instructions": "b"}, context=9999)["max_output_tokens"] == DEFAULT_NEW_TOKENS
    )


def site(host, origin=None, reached_at="127.0.0.1", relation=None):
    check_host(host, reached_at)
    check_origin(origin, host, relation)


@pytest.mark.parametrize(
    "request_",
    [
        ("127.0.0.1:8000",), ("localhost:9000",), ("[::1]:8000",), ("LOCALHOST",),
        ("localhost:8000", "http://localhost:8000"), ("[::1]:80", "http://[::1]:80", "::1"),
        ("gpu7.example.org:8000", None, "10.0.0.7"), ("10.0.0.7:8000", "http://10.0.0.7:8000", "10.0.0.7"),
        ("model.example.org", "https://model.example.org", "10.0.0.7"), ("model.example.org", None, "/tmp/socket"),
        (f"{socket.gethostname()}:8000", None, "127.0.1.1"),
        ("localhost:8000", None, "127.0.0.1", "none"), ("localhost:8000", None, "127.0.0.1", "same-origin"),
    ],
)  # fmt: skip
def test_requests_of_programs_and_of_the_server_s_own_pages_are_taken(request_):
    site(*request_)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (("evil.example:8000",), r"the Host is 'evil.example:8000'; a request to this machine's own address names"),
        (("127.0.0.1.evil.example",), "the Host is"),
        (("",), "the Host is ''"),
        (("[::1",), "the Host is"),
        (("10.0.0.7:8000",), "the Host is"),
        (("evil.example:8000", None, "::ffff:127.0.0.1"), "the Host is"),
        (("localhost:8000", "http://evil.example"), "a page of another site, 'http://evil.example'"),
        (("localhost:8000", "null"), "a page of another site, 'null'"),
        (("localhost:8000", "http://localhost:3000"), "a page of another site"),
        (("localhost:8000", "http://localhost:8000.evil.example"), "a page of another site"),
        (("10.0.0.7:8000", "http://evil.example", "10.0.0.7"), "a page of another site"),
        (("localhost:8000", None, "127.0.0.1", "cross-site"), "which the browser does not name"),
        (("localhost:8000", None, "127.0.0.1", "same-site"), "which the browser does not name"),
    ],
)
def test_requests_of_other_sites_are_refused(request_, message):
    with pytest.raises(BadRequest, match=message) as refused:
        site(*request_)
    assert refused.value.status == 403


def test_websockets_are_closed():
    """A page of another site can open one without asking first."""
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(SiteGuard(None)({"type": "websocket", "path": "/v1/realtime"}, None, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_while_a_request_is_checked_others_are_answered():
    ticks, sent = [], []

    def count(path, request):
        time.sleep(0.5)
        return 10**6

    async def receive():
        return {"type": "http.request", "body": b'{"prompt": "abc"}'}

    async def send(message):
        sent.append(message)

    async def tick():
        while not sent:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def both():
        checks = RequestChecks(None, "tiny", count, 64, together=False)
        scope = {"method": "POST", "path": COMPLETIONS, "headers": []}
        await asyncio.gather(checks(scope, receive, send), tick())

    asyncio.run(both())
    assert sent[0]["status"] == 400
    assert len(ticks) > 10


def test_what_changes_nothing_is_dropped():
    sent = {"user": "me", "stream_options": {"include_usage": True}, "n": 1, "logprobs": None, "presence_penalty": 0}
    sent |= {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "stop": []}
    assert check(CHAT, {"messages": HELLO, **sent}) == check(CHAT, {"messages": HELLO})
    assert check(COMPLETIONS, {"prompt": "a", "stop": ""}) == check(COMPLETIONS, {"prompt": "a"})
    answered = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}
    assert check(CHAT, {"messages": [*HELLO, answered]})["messages"][1] == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        (CHAT, [1], None, "the request is [1]; send an object"),
        (CHAT, {}, "messages", "messages is missing"),
        (CHAT, {"messages": []}, "messages", "messages is []: List should have at least 1 item"),
        (CHAT, {"messages": "hi"}, "messages", "messages is 'hi': Input should be a valid list"),
        (CHAT, {"messages": ["hi"]}, "messages", "messages.0 is 'hi'"),
        (CHAT, {"messages": [*HELLO, {"content": "x"}]}, "messages", "messages.1.role is {'content': 'x'}: Field req"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages", "messages.0.role is 'king': Input should"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages", "messages.0.content is 3: Input should be"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "messages.0.content is {'role': 'user'}: Field required"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "messages.0.content.0.type is 'im"),
        (CHAT, {"messages": [{"role": "tool", "content": "", "tool_calls": [1]}]}, "messages", "messages.0.tool_calls"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "tools is not taken here"),
        (CHAT, {"messages": HELLO, "logprobs": True}, "logprobs", "logprobs is not taken here"),
        (COMPLETIONS, {"prompt": ["a"]}, "prompt", "prompt is ['a']: Input should be a valid string"),
        (COMPLETIONS, {"prompt": "\ud800"}, None, "surrogates not allowed"),
        (COMPLETIONS, {"prompt": "a", "colour": 1}, "colour", "colour is not taken here; accepted: max_tokens, model"),
        (COMPLETIONS, {"prompt": "a", "generation_config": "{}"}, "generation_config", "not taken"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens is 0: Input should be greater than"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5: Input should be a valid"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens", "max_tokens is True"),
        (
            COMPLETIONS,
            {"prompt": "a", "max_tokens": 60},
            "prompt",
            "10 tokens and 60 more were asked for; this model has 64",
        ),
        (COMPLETIONS, {"prompt": "a", "temperature": 2.1}, "temperature", "is 2.1: Input should be less than"),
        (COMPLETIONS, {"prompt": "a", "temperature": float("nan")}, "temperature", "should be a finite number"),
        (COMPLETIONS, {"prompt": "a", "top_p": -0.1}, "top_p", "greater than or equal to 0"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed", f"less than {2**63}"),
        (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop", "stop is 5"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", "stop.0 is ''"),
        (COMPLETIONS, {"prompt": "a", "stop": list("abcde")}, "stop", "List should have at most 4 items"),
        (COMPLETIONS, {"prompt": "a", "stop": "a" * 1001}, "stop", "String should have at most 1000 characters"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream", "stream is 'yes': Input should be a valid boolean"),
        (COMPLETIONS, {"prompt": "a", "n": 3}, "n", "n is not taken here"),
        (RESPONSES, {"input": 5}, "input", "input is 5"),
        (RESPONSES, {"input": "a", "stop": "b"}, "stop", "stop is not taken here"),
        (RESPONSES, {"input": "a", "instructions": 5}, "instructions", "instructions is 5"),
    ],
)
def test_bad_requests_are_refused_in_words(path, body, field, words):
    with pytest.raises(BadRequest) as refused:
        check(path, body)
    assert words in str(refused.value)
    assert refused.value.body()["error"]["param"] == field
    assert refused.value.status == 400


def test_prompt_and_answer_must_fit():
    assert check(COMPLETIONS, {"prompt": "a", "max_tokens": 54})["max_tokens"] == 54
    with pytest.raises(BadRequest, match="has 64 tokens; this model has 64 positions for both"):
        check(COMPLETIONS, {"prompt": "a"}, used=64)
    with pytest.raises(BadRequest, match="prompt has no tokens"):
        check(COMPLETIONS, {"prompt": ""}, used=0)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(BadRequest) as refused:
        check(COMPLETIONS, {"prompt": ["a" * 10_000]})
    assert len(str(refused.value)) < 200


class Words:
    """A word tokenizer whose chat template gives one word per message plus one."""

    def __call__(self, text):
        return {"input_ids": text.split()}

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, return_dict):
        assert add_generation_prompt
        return {"input_ids": [word for message in messages for word in (message["role"], *message["content"].split())]}


def test_tokens_are_counted_as_the_server_will_encode_them():
    words = Words()
    assert count_prompt_tokens(words, COMPLETIONS, {"prompt": "a b c"}) == 3
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]
    assert count_prompt_tokens(words, CHAT, {"messages": [*HELLO, {"role": "user", "content": parts}]}) == 6
    assert count_prompt_tokens(words, RESPONSES, {"input": "a b", "instructions": "be kind"}) == 6


def test_messages_that_a_template_refuses_are_a_bad_request():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(BadRequest, match="template refuses these messages: System role not supported"):
        count_prompt_tokens(tokenizer, RESPONSES, {"input": "a b", "instructions": "be kind"})
