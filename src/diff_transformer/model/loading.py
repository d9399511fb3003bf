"""Load a saved model: only from safetensors (reading a pickle can run code), and only with all of its weights."""

import hashlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diff_transformer.checks import did_you_mean, first_line, listed
from diff_transformer.errors import UserError
from diff_transformer.model.presets import PRESETS, preset
from diff_transformer.model.saved import read_settings, unreadable, weight_files

DTYPES = ("float32", "bfloat16", "float16")


def load_model(name_or_path: str, *, device: str | None = None, dtype: str | None = None) -> tuple[Any, Any]:
    """Load a causal LM in eval mode and its tokenizer from a folder, the hub, or a preset (untrained, byte tokenizer).

    Args:
        device: "cpu", "cuda", ...; None takes CUDA if available.
        dtype: "float32", "bfloat16" or "float16"; None keeps that of the checkpoint. Lambda stays fp32.

    Raises:
        ValueError: for an unknown dtype, or a tokenizer that cannot be read; and as ``read_model``.
    """
    import torch

    if dtype not in (None, *DTYPES):
        raise UserError(f"dtype is {dtype!r}; give {', '.join(DTYPES)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {device!r}, and PyTorch finds no CUDA device here; give cpu")
    options: dict[str, Any] = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    if name_or_path in PRESETS and not Path(name_or_path).exists():
        return _untrained(name_or_path, device, options.get("dtype", torch.float32))
    path = str(Path(name_or_path).expanduser()) if name_or_path.startswith("~") else name_or_path
    return read_model(path, **options).to(device).eval(), read_tokenizer(path)


def read_model(name_or_path: str | Path, model_class: Any = None, **options: Any) -> Any:
    """``model_class.from_pretrained`` from safetensors only, with a check that no weight is missing.

    Args:
        model_class: ``AutoModelForCausalLM`` if None.
        options: of ``from_pretrained``. With ``output_loading_info`` the model and the loading info are returned, and
            the caller must check for missing weights.

    Raises:
        ValueError: if safetensors are missing, damaged or incomplete, or for what transformers refuses.
        FileNotFoundError: if there is no such model.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    import diff_transformer.model.modeling  # noqa: F401  (registers the model class)

    folder, caller_checks = Path(name_or_path), options.pop("output_loading_info", False)
    if folder.is_dir():
        read_settings(folder)
        weight_files(folder)
    elif str(name_or_path).startswith((".", "/")):
        raise UserError(f"no model at {name_or_path}; give a folder written by save_pretrained")
    options = {"trust_remote_code": False, **options, "use_safetensors": True, "output_loading_info": True}
    try:
        model_class = model_class or AutoModelForCausalLM
        loaded: Any = model_class.from_pretrained(str(name_or_path), **options, ignore_mismatched_sizes=True)
    except SafetensorError as error:
        raise unreadable(folder, error) from None
    except OSError as error:
        if folder.is_dir():
            raise UserError(f"{name_or_path} cannot be loaded: {first_line(error)}") from None
        raise UserError(
            f"no model called {name_or_path}{did_you_mean(str(name_or_path), PRESETS)} ({first_line(error)}); give a "
            "folder written by save_pretrained, a name on the hub that is cached or can be downloaded, or a preset: "
            f"{', '.join(PRESETS)}"
        ) from None
    model, info = loaded
    if caller_checks:
        return loaded
    if wrong := misfits(info, unexpected=False):
        raise UserError(
            f"the weights in {name_or_path} are not all of those that {type(model).__name__} has by its config.json: "
            f"{wrong}. They would be random; give a causal language model with the config.json and all the files that "
            "it was saved with"
        )
    return model


def misfits(info: Mapping[str, Any], *, unexpected: bool = True) -> str:
    """Describe the missing, misshapen and (with ``unexpected``) unknown weights that ``from_pretrained`` reports."""
    shapes = [f"{key} {tuple(saved)} (expected {tuple(wanted)})" for key, saved, wanted in info["mismatched_keys"]]
    kinds = {"missing": info["missing_keys"], "of another shape": shapes}
    if unexpected:
        kinds["not of the model"] = info["unexpected_keys"]
    return "; ".join(f"{len(names)} {kind}: {listed(sorted(names))}" for kind, names in kinds.items() if names)


def model_path(model: str) -> str:
    """``model`` as engines take it: the path of a folder that can hold a model, or a name on the hub.

    Raises:
        FileNotFoundError: for a folder that is not there, or has no configuration or tokenizer. ValueError: as
            ``weight_files``.
    """
    folder = Path(model).expanduser()
    if not folder.exists():
        if model.startswith(("/", ".", "~")):
            raise UserError(f"no model at {model}; give the folder of a saved model, or a name on the hub")
        return model
    if not (folder / "config.json").exists():
        raise UserError(f"{model} has no config.json; give the folder of a saved model")
    if not (folder / "tokenizer_config.json").exists():
        raise UserError(f"{model} has no tokenizer; save one into the same folder (tokenizer.save_pretrained)")
    weight_files(folder)
    return str(folder)


def special_tokens(model: Any) -> dict[str, Any]:
    """The special tokens among a model's generation defaults, by name."""
    return {name: getattr(model.generation_config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


@contextmanager
def plain_defaults(model: Any) -> Generator[None]:
    """Context manager that reduces the model's generation defaults to its special tokens.

    Otherwise ``generate`` would use each other default (``min_p``, ``num_return_sequences``, ...) that a call omits.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig(**special_tokens(model))
    try:
        yield
    finally:
        model.generation_config = own


def padding_token(model: Any, tokenizer: Any) -> int:
    """A token that the model can embed, for padding that a mask hides. A tokenizer may have more tokens than the model
    embeds, such as a ``[PAD]`` that was added later."""
    ends = model.generation_config.eos_token_id
    rows = model.get_input_embeddings().weight.shape[0]
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends]))
    return next((token for token in known if token is not None and token < rows), 0)


def fingerprint(model: Any) -> str:
    """12 hexadecimal digits of a model's weights: of up to 1024 values of each parameter, in fp32."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().flatten()
        values = values[:: max(1, len(values) // 1024)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def label_of(name_or_path: str) -> str:
    """A model's name in results: the last distinctive part of its path (``diff-seed0`` for
    ``members/diff-seed0/run/model``, ``tiny`` for a snapshot of ``acme/tiny`` in the hub's cache)."""
    path = Path(name_or_path)
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rpartition("--")[2]
    parts = [part for part in path.parts if part not in ("run", "model", "/", ".", "..", "~")]
    return parts[-1] if parts else path.resolve().name


def _untrained(name: str, device: str, dtype: Any) -> tuple[Any, Any]:
    import torch

    from diff_transformer.data.tokenizer import byte_tokenizer
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(preset(name, vocab_size=max(preset(name).vocab_size, len(tokenizer))))
    model = model.to(device=device, dtype=dtype).eval()
    return model, tokenizer


def read_tokenizer(path: str) -> Any:
    """Load the tokenizer that is saved with a model, from a folder or the hub.

    Raises:
        ValueError: if there is none, or its files are damaged.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # a damaged file raises KeyError, TypeError or a bare Exception
        raise UserError(
            f"{path} has no tokenizer that can be read ({first_line(error)}); save it beside the model with "
            "save_pretrained, or copy or download it again"
        ) from None
