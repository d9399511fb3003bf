"""``diff-transformer serve``: start vLLM with our plugin, or transformers' server, for one model."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import zip_longest

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
    if not value_of("--config", options):  # vLLM's file, which options would override
        options = ["--host", "127.0.0.1", "--port", "8000", *options]
    announce(path, engine, options)
    if engine == "vllm":  # it takes this process's place, so that signals reach it
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path, *options]
        os.execv(sys.executable, command)
    else:
        serve_with_transformers(path, options)


def value_of(name: str, options: Sequence[str]) -> str:
    """The last value of an option, ``--name VALUE`` or ``--name=VALUE``; "" without one."""
    value = ""
    for word, following in zip_longest(options, options[1:], fillvalue=""):
        if word.partition("=")[0] == name:
            value = word.partition("=")[2] or following
    return value


def announce(path: str, engine: str, options: Sequence[str]) -> None:
    """Print the address and a request to try."""
    if file := value_of("--config", options):
        print(f"engine: {engine}; address: that of {file}; stop with Ctrl-C", flush=True)
        return
    url = f"http://{value_of('--host', options)}:{value_of('--port', options)}/v1"
    name = value_of("--served-model-name", options) or path
    print(f"engine: {engine}; address: {url}; stop with Ctrl-C. When the model is loaded, try:")
    print(
        f"""curl {url}/completions -H 'Content-Type: application/json' """
        f"""-d '{{"model": "{name}", "prompt": "Once upon a time", "max_tokens": 20}}'""",
        flush=True,
    )


def serve_with_transformers(path: str, options: Sequence[str]) -> None:
    """Run ``transformers serve`` in this process, where the models of this package are registered."""
    import transformers
    from transformers.cli.transformers import app

    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    # The server looks up a model's class here, by its name in config.json.
    setattr(transformers, DiffTransformerForCausalLM.__name__, DiffTransformerForCausalLM)
    app(["serve", path, *options])
