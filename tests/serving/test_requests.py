"""What is refused, in words, without a server or a model."""

import pytest

from diff_transformer.serving.middleware import check_site
from diff_transformer.serving.requests import DEFAULT_NEW_TOKENS, BadRequest, checked, count_prompt_tokens

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]


def check(path, body, context=64, used=10):
    return checked(path, body, ["tiny", "/models/tiny"], lambda path, body: used, context)


def test_a_plain_request_is_filled_in():
    assert check(CHAT, {"messages": HELLO}) == {
        "messages": HELLO, "model": "tiny", "stream": False, "max_completion_tokens": 54,
    }  # fmt: skip
    assert check(COMPLETIONS, {"prompt": "a", "max_tokens": 5, "model": "/models/tiny", "stream": True}) == {
        "prompt": "a", "model": "tiny", "stream": True, "max_tokens": 5,
    }  # fmt: skip
    assert (
        check(RESPONSES, {"input": "a", "instructions": "b"}, context=9999)["max_output_tokens"] == DEFAULT_NEW_TOKENS
    )


def site(host, origin=None, listens_on="127.0.0.1"):
    headers = {b"host": host.encode()} | ({} if origin is None else {b"origin": origin.encode()})
    check_site(headers, listens_on)


@pytest.mark.parametrize(
    "request_",
    [
        ("127.0.0.1:8000",), ("localhost:9000",), ("[::1]:8000",), ("LOCALHOST",),
        ("localhost:8000", "http://localhost:8000"), ("127.0.0.1:80", "http://127.0.0.1:80", "localhost"),
        ("gpu7.example.org:8000", None, "0.0.0.0"), ("10.0.0.7:8000", "http://10.0.0.7:8000", "0.0.0.0"),
        ("model.example.org", "https://model.example.org", "10.0.0.7"), ("box:8000", None, "box"),
    ],
)  # fmt: skip
def test_requests_of_programs_and_of_the_server_s_own_pages_are_taken(request_):
    site(*request_)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (("evil.example:8000",), r"the Host is 'evil.example:8000'; this server answers on this machine only"),
        (("127.0.0.1.evil.example",), "the Host is"),
        (("",), "the Host is ''"),
        (("[::1",), "the Host is"),
        (("10.0.0.7:8000",), "the Host is"),
        (("localhost:8000", "http://evil.example"), "a page of another site, 'http://evil.example'"),
        (("localhost:8000", "null"), "a page of another site, 'null'"),
        (("localhost:8000", "http://localhost:3000"), "a page of another site"),
        (("localhost:8000", "http://localhost:8000.evil.example"), "a page of another site"),
        (("10.0.0.7:8000", "http://evil.example", "0.0.0.0"), "a page of another site"),
    ],
)
def test_requests_of_other_sites_are_refused(request_, message):
    with pytest.raises(BadRequest, match=message) as refused:
        site(*request_)
    assert refused.value.status == 403


def test_what_changes_nothing_is_dropped():
    sent = {"user": "me", "stream_options": {"include_usage": True}, "n": 1, "logprobs": None, "presence_penalty": 0}
    assert check(CHAT, {"messages": HELLO, **sent, "tools": []}) == check(CHAT, {"messages": HELLO})


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        (CHAT, [1], None, "is a JSON array; send an object"),
        (CHAT, "text", None, "is a JSON string"),
        (CHAT, {}, "messages", "messages is missing"),
        (CHAT, {"messages": []}, "messages", "messages is []"),
        (CHAT, {"messages": "hi"}, "messages", "messages is 'hi'"),
        (CHAT, {"messages": ["hi"]}, "messages", "messages[0] is 'hi'; it needs a role"),
        (CHAT, {"messages": [*HELLO, {"content": "x"}]}, "messages", "messages[1]"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages", "a role out of system"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages", "must be a string"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "is missing; it must be a string"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "reads text only"),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "messages", "has tool_calls"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "tools is not taken here"),
        (CHAT, {"messages": HELLO, "logprobs": True}, "logprobs", "logprobs is not taken here"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "not taken"),
        (COMPLETIONS, {"prompt": ["a"]}, "prompt", "send one string"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "Unicode"),
        (COMPLETIONS, {"prompt": "a", "colour": 1}, "colour", "colour is not taken here; accepted: max_tokens, model"),
        (COMPLETIONS, {"prompt": "a", "generation_config": "{}"}, "generation_config", "not taken"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens is -1"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "max_tokens is '5'"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "a whole number"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens", "max_tokens is True"),
        (
            COMPLETIONS,
            {"prompt": "a", "max_tokens": 60},
            "prompt",
            "10 tokens and 60 more were asked for; this model has 64",
        ),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature", "a number from 0 to 2"),
        (COMPLETIONS, {"prompt": "a", "temperature": 2.1}, "temperature", "temperature is 2.1"),
        (COMPLETIONS, {"prompt": "a", "top_p": -0.1}, "top_p", "a number from 0 to 1"),
        (COMPLETIONS, {"prompt": "a", "seed": 10**30}, "seed", "a whole number from 0"),
        (COMPLETIONS, {"prompt": "a", "seed": -1}, "seed", "seed is -1"),
        (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop", "stop is 5"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", "a list of strings"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream", "true or false"),
        (COMPLETIONS, {"prompt": "a", "n": 3}, "n", "n is 3; this server gives one choice"),
        (COMPLETIONS, {"prompt": "a", "n": True}, "n", "one choice"),
        (RESPONSES, {"input": 5}, "input", "input is 5"),
        (RESPONSES, {"input": "a", "previous_response_id": "x"}, "previous_response_id", "not taken"),
        (RESPONSES, {"input": "a", "instructions": 5}, "instructions", "must be a string"),
    ],
)
def test_bad_requests_are_refused_in_words(path, body, field, words):
    with pytest.raises(BadRequest) as refused:
        check(path, body)
    assert words in str(refused.value)
    assert refused.value.body()["error"]["param"] == field
    assert refused.value.status == 400


def test_another_model_is_not_found():
    with pytest.raises(BadRequest, match="no model 'gpt-4' here; this server has 'tiny'") as refused:
        check(CHAT, {"messages": HELLO, "model": "gpt-4"})
    assert refused.value.status == 404
    assert refused.value.body()["error"]["type"] == "not_found_error"


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
