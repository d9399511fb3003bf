"""Which engine serves a model: vLLM or transformers' own server; and vLLM's command line for our options."""

import importlib.util
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diff_transformer.checks import first_line, require_known, require_port
from diff_transformer.guard import is_loopback
from diff_transformer.model.loading import DTYPES, model_path, read_tokenizer

ENGINES = ("auto", "vllm", "transformers")
GUARD = "diff_transformer.serving.middleware.SiteGuard"


def choose_engine(
    wanted: str, model: str, *, attn_implementation: str | None = None, device: str = "auto"
) -> tuple[str, str]:
    """The engine that serves ``model``, and why ``"auto"`` did not take vLLM where it is installed, or "".

    Args:
        wanted: one of ``ENGINES``. ``"auto"`` takes vLLM if it is installed and can serve the model with these options.
        model: folder, or name on the hub. attn_implementation, device: as for ``server.make_server``.

    Raises:
        FileNotFoundError: for a folder that is not there, or has no configuration, weights or tokenizer.
        ValueError: for another ``wanted``, for weights that are no safetensors, and for ``"vllm"`` where vLLM cannot
            serve the model.
    """
    require_known("engine", wanted, ENGINES)
    path = model_path(model)
    if wanted == "transformers":
        return wanted, ""
    reason = vllm_unsupported_reason(path, attn_implementation=attn_implementation, device=device)
    if reason is None:
        return "vllm", ""
    if wanted == "vllm":
        raise ValueError(reason)
    return "transformers", reason if vllm_folder() else ""


def vllm_folder() -> Path | None:
    """Where vLLM is installed, without importing it, which takes seconds."""
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent


def vllm_unsupported_reason(path: str, *, attn_implementation: str | None, device: str) -> str | None:
    """Why vLLM cannot serve the model at ``path`` with these options, and what to do; None if it can."""
    from diff_transformer.serving.vllm.checks import ARCHITECTURE, check_config, check_differential, check_version

    folder = vllm_folder()
    if folder is None:
        return "vLLM is not installed; pip install 'diff-transformer[vllm]', or give --engine transformers"
    if attn_implementation is not None:
        return (
            f"attn_implementation={attn_implementation!r} is one of transformers', and vLLM has its own; leave it out, "
            "or give --engine transformers"
        )
    if device != "auto":
        return f"device is {device!r}, and vLLM uses what it was built for; leave it out, or give --engine transformers"
    try:
        config = read_config(path)
        in_place = getattr(config, "differential", None) is not None
        ours = config.model_type == "diff_transformer" or ARCHITECTURE in (config.architectures or ())
        if not in_place and not ours:
            return None  # vLLM's own matter
        if (folder / "_version.py").exists():
            check_version(runpy.run_path(str(folder / "_version.py"))["__version_tuple__"])
        (check_differential if in_place else check_config)(config, path)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def read_config(path: str):
    """The configuration of a model, ours for a published one.

    Raises:
        ValueError: if it cannot be read, or for a published model that the plugin does not serve.
    """
    from transformers import AutoConfig, PreTrainedConfig

    import diff_transformer  # noqa: F401  (registers the configuration)
    from diff_transformer.serving.vllm.published import MODEL_TYPES, our_config

    try:
        settings = PreTrainedConfig.get_config_dict(path)[0]
        if settings.get("model_type") not in MODEL_TYPES:
            return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, TypeError, KeyError) as error:
        if "custom code" in str(error):
            raise ValueError(
                f"{path} brings its own code, which does not run here; serve the model that it was exported from, or "
                f"call vLLM yourself: vllm serve {path} --trust-remote-code --model-impl transformers"
            ) from None
        raise ValueError(
            f"the config.json of {path} cannot be read ({first_line(error)}); copy or download it again"
        ) from None
    return our_config(settings, path)


def vllm_command(
    model: str, *, host: str = "127.0.0.1", port: int = 8000, name: str, requests_at_once: int | None = None,
    dtype: str = "auto",
) -> list[str]:  # fmt: skip
    """The command that serves ``model`` with vLLM, behind ``SiteGuard``; arguments as for ``server.make_server``.

    Weights are read from safetensors only, ``dtype="auto"`` is the checkpoint's, and a tokenizer without a chat
    template gets the plain one.
    """
    from diff_transformer.serving.requests import PLAIN_TEMPLATE

    require_port(port)
    require_known("dtype", dtype, ("auto", *DTYPES))
    path = model_path(model)
    if dtype == "auto":  # vLLM's "auto" rounds an fp32 checkpoint to 16 bits
        dtype = str(read_config(path).dtype or "auto").removeprefix("torch.")
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path, "--served-model-name", name,
        "--host", host, "--port", str(port_to_listen(host, port)), "--dtype", dtype, "--load-format", "safetensors",
        "--middleware", GUARD,
    ]  # fmt: skip
    if requests_at_once is not None:
        command += ["--max-num-seqs", str(requests_at_once)]
    if read_tokenizer(path).chat_template is None:
        command += ["--chat-template", PLAIN_TEMPLATE]
    return command


def port_to_listen(host: str, port: int = 0) -> int:
    """``port``, or a free one for 0: vLLM takes port 0 too, but does not say which it got.

    Raises:
        OSError: if ``host`` cannot listen there.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that a server has just left
            trial.bind((host, port))
            return trial.getsockname()[1]
    except OSError as error:
        raise OSError(
            f"{host} cannot listen on port {port} ({error.strerror}); give another --port, 0 for any that is free, or "
            "an address of this machine as --host"
        ) from None


def serve(
    model: str, vllm_options: Sequence[str] = (), *, engine: str = "auto", host: str = "127.0.0.1", port: int = 8000,
    name: str | None = None, continuous_batching: bool = False, attn_implementation: str | None = None,
    device: str = "auto", **options: Any,
) -> None:  # fmt: skip
    """Serve ``model`` until Ctrl-C. vLLM takes this process's place, so that nothing stands between it and signals.

    Args:
        vllm_options: further words of vLLM's command line.
        engine: one of ``ENGINES``.
        continuous_batching: vLLM batches requests whatever it is. It, ``options`` and the rest are those of
            ``server.make_server``.

    Raises:
        RuntimeError, FileNotFoundError, ValueError: as ``choose_engine`` and ``make_server``, before an engine starts.
        OSError: as ``port_to_listen``.
    """
    from diff_transformer.model.loading import label_of
    from diff_transformer.serving.server import make_server

    chosen, reason = choose_engine(engine, model, attn_implementation=attn_implementation, device=device)
    if vllm_options and chosen != "vllm":
        raise ValueError(
            f"{' '.join(vllm_options)}: these are options of vLLM, which does not serve this model"
            f"{f' ({reason})' if reason else ''}; leave them out"
        )
    require_port(port)
    port_to_listen(host, port)  # before a model is read
    if not is_loopback(host):
        print(f"{host}: anyone who reaches this address may use the model; there is no authentication", file=sys.stderr)
    if reason:
        print(f"not served by vLLM: {reason}", file=sys.stderr)
    name = name or label_of(model)
    if chosen == "vllm":
        command = [*vllm_command(model, host=host, port=port, name=name, **options), *vllm_options]
        print(f"engine: vLLM; model: {name}; stop with Ctrl-C", flush=True)
        os.execve(command[0], command, {"VLLM_NO_USAGE_STATS": "1", **os.environ})
    server = make_server(
        model, host=host, port=port, name=name, continuous_batching=continuous_batching,
        attn_implementation=attn_implementation, device=device, **options,
    )  # fmt: skip
    print(f"engine: transformers; model: {name}; stop with Ctrl-C", flush=True)
    server.run()
