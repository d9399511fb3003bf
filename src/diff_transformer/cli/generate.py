"""``diff-transformer generate``: continue one prompt as it streams."""

import sys
from pathlib import Path

from diff_transformer.inference.generation import GenerationSettings
from diff_transformer.inference.generation import generate as continue_prompts
from diff_transformer.model.loading import load_model
from diff_transformer.model.presets import PRESETS


def run_generate(
    model: str,
    prompt: str,
    settings: GenerationSettings,
    *,
    device: str | None = None,
    dtype: str | None = None,
    assistant: str | None = None,
) -> None:
    """Write the prompt and stream its continuation.

    Args:
        model, assistant, device, dtype: as in ``load_model``.
        prompt: the text itself, or "-" for standard input.

    Raises:
        UserError: as ``GenerationSettings``, ``load_model`` and ``generate``.
    """
    started = False
    prompt = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    for name in (model, assistant):
        if name in PRESETS and not Path(name).exists():
            print(f"{name} is a preset: an untrained model over bytes, whose text means nothing", file=sys.stderr)
    loaded, tokenizer = load_model(model, device=device, dtype=dtype)
    helper = None if assistant is None else load_model(assistant, device=device, dtype=dtype)[0]
    if settings.compiled:
        print("compiling the step of one token: up to a minute or two, once in a process", file=sys.stderr)

    def send(piece: str):
        nonlocal started
        print(piece if started else prompt + piece, end="", flush=True)  # an invalid prompt must raise without output
        started = True

    continue_prompts(loaded, tokenizer, [prompt], settings, assistant=helper, on_text=send)
    print("" if started else prompt)
