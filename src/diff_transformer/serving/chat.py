"""Prompts of conversations: a plain template for tokenizers without one, and how many tokens a request has."""

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def give_template(tokenizer) -> bool:
    """Give the tokenizer the plain template if it has none; True if so. Language models that were never trained on
    conversations have no better one."""
    if tokenizer.chat_template is not None:
        return False
    tokenizer.chat_template = PLAIN_TEMPLATE
    return True


def count_prompt_tokens(tokenizer, path: str, body: dict) -> int:
    """Tokens of the prompt of a checked request, as the server will encode it."""
    if path == "/v1/completions":
        return len(tokenizer(body["prompt"])["input_ids"])
    given = body["messages"] if path == "/v1/chat/completions" else body["input"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if body.get("instructions"):
        messages = [{"role": "system", "content": body["instructions"]}, *messages]
    plain = [{"role": message["role"], "content": _text(message["content"])} for message in messages]
    encoded = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(encoded["input_ids"])


def _text(content: str | list) -> str:
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)
