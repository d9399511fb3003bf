"""``diff-transformer generate``: continue one prompt as it streams, or a file of prompts in batches."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from diff_transformer.checks import require_positive
from diff_transformer.errors import UserError
from diff_transformer.inference.generation import GenerationSettings
from diff_transformer.inference.generation import generate as continue_prompts
from diff_transformer.model.loading import load_model
from diff_transformer.model.presets import PRESETS


def run_generate(
    model: str,
    prompt: str | None,
    settings: GenerationSettings,
    *,
    prompts_file: Path | None = None,
    batch_size: int = 8,
    device: str | None = None,
    dtype: str | None = None,
    assistant: str | None = None,
    write: Callable[[str], object] | None = None,
) -> None:
    """Write the prompt and stream its continuation; or write one line of JSON for each prompt of a file.

    Args:
        model, assistant, device, dtype: as in ``load_model``.
        prompt: the text itself, or "-" for standard input.
        prompts_file: one prompt a line; each gives a line ``{"prompt": ..., "text": ...}``.
        batch_size: prompts of the file in one batch.
        write: receives the text; None writes to standard output.

    Raises:
        ValueError: for none or both of ``prompt`` and ``prompts_file``, and as ``GenerationSettings``, ``load_model``
            and ``generate``. FileNotFoundError: for a file or a model that does not exist.
    """
    require_positive(batch_size=batch_size)
    write = write or sys.stdout.write
    if (prompt is None) == (prompts_file is None):
        raise UserError("give one of a prompt (- reads standard input) and --prompts FILE")
    prompts = [_read(prompt)] if prompt is not None else _lines(prompts_file)
    for name in (model, assistant):
        if name in PRESETS and not Path(name).exists():
            print(f"{name} is a preset: an untrained model over bytes, whose text means nothing", file=sys.stderr)
    loaded, tokenizer = load_model(model, device=device, dtype=dtype)
    helper = None if assistant is None else load_model(assistant, device=device, dtype=dtype)[0]
    if settings.compiled:
        print("compiling the step of one token: up to a minute or two, once in a process", file=sys.stderr)
    if prompts_file is None:
        _stream(loaded, tokenizer, prompts[0], settings, helper, write)
        return
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        texts = continue_prompts(loaded, tokenizer, batch, settings, assistant=helper)
        for text_before, text in zip(batch, texts, strict=True):
            write(json.dumps({"prompt": text_before, "text": text}, ensure_ascii=False) + "\n")


def _stream(
    model, tokenizer, prompt: str, settings: GenerationSettings, assistant, write: Callable[[str], object]
) -> None:
    started = False

    def send(piece: str):
        nonlocal started
        write(piece if started else prompt + piece)  # not before: an invalid prompt must raise without output
        started = True
        sys.stdout.flush()

    continue_prompts(model, tokenizer, [prompt], settings, assistant=assistant, on_text=send)
    write("\n" if started else prompt + "\n")


def _read(prompt: str) -> str:
    return sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt


def _lines(path: Path | None) -> Sequence[str]:
    from diff_transformer.data.documents import decoded

    assert path is not None
    if not path.is_file():
        raise UserError(f"{path} is not a file; give a text file with a prompt a line")
    lines = [line for line in decoded(str(path), path.read_bytes()).split("\n") if line.strip()]
    if not lines:
        raise UserError(f"{path} has no prompt; write one a line")
    return lines
