"""``diff-transformer serve``: start vLLM with our plugin, or transformers' server, for one model."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from transformers import PreTrainedConfig

from diff_transformer.checks import first_line
from diff_transformer.errors import UserError
from diff_transformer.model.loading import model_path

ENGINES = ("auto", "vllm", "transformers")


def serve(model: str, options: Sequence[str] = (), *, engine: str = "auto") -> None:
    """Serve a model to OpenAI's clients until Ctrl-C, at 127.0.0.1:8000 unless ``options`` say otherwise.

    Args:
        model: folder of a model with its tokenizer, or its name on the hub.
        options: options of ``vllm serve`` or ``transformers serve``, passed on as they are.
        engine: "vllm", "transformers", or "auto": vLLM where it is installed.

    Raises:
        UserError: no such model, an unknown engine, or one that is not installed.
    """
    if engine not in ENGINES:
        raise UserError(f"engine is {engine!r}; give {', '.join(ENGINES)}")
    path = model_path(model)
    try:
        PreTrainedConfig.get_config_dict(path)
    except OSError as error:
        raise UserError(f"no model {model!r} ({first_line(error)}); give a folder, or a name on the hub") from None
    if engine == "auto":
        engine = "vllm" if find_spec("vllm") else "transformers"
    if find_spec("vllm" if engine == "vllm" else "fastapi") is None:
        extra = "vllm" if engine == "vllm" else "serving"
        raise UserError(f"{engine} cannot serve here; install it: pip install 'diff-transformer[{extra}]'")
    if not any(option.partition("=")[0] == "--config" for option in options):  # vLLM's file, which these would override
        options = ["--host", "127.0.0.1", "--port", "8000", *options]
    print(f"engine: {engine}; stop with Ctrl-C", flush=True)
    if engine == "vllm":  # it takes this process's place, so that signals reach it
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path, *options]
        os.execv(sys.executable, command)
    else:
        serve_with_transformers(path, options)


def serve_with_transformers(path: str, options: Sequence[str]) -> None:
    """Run ``transformers serve`` in this process, where the models of this package are registered."""
    import transformers
    from transformers.cli.transformers import app

    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    # The server looks up a model's class here, by its name in config.json.
    setattr(transformers, DiffTransformerForCausalLM.__name__, DiffTransformerForCausalLM)
    app(["serve", path, *options])
