"""Load a saved model: only from safetensors (reading a pickle can run code), and only with all of its weights."""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from diff_transformer.checks import did_you_mean, first_line, listed, read_json, require_device, require_known
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.errors import UserError
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.model.presets import PRESETS, preset

DTYPES = ("float32", "bfloat16", "float16")
UNREADABLE = (OSError, ValueError, StrictDataclassError)  # of a folder that transformers cannot read
_ADVICE = "docs/conversion.md says how to write safetensors from a pickle or GGUF"


def load_model(name_or_path: str, *, device: str | None = None, dtype: str | None = None) -> tuple[Any, Any]:
    """Load a causal LM in eval mode and its tokenizer.

    From a folder (of the model, or of the run that trained it), the hub, or a preset (untrained, byte tokenizer).

    Args:
        device: "cpu", "cuda", ...; None takes CUDA if available.
        dtype: "float32", "bfloat16" or "float16"; None takes float32 on a CPU, where half precision is several times
            slower without instructions for it, else that of the checkpoint. Lambda stays fp32.

    Raises:
        UserError: for an unknown dtype or device; and as ``read_model``.
    """
    if dtype is not None:
        require_known("dtype", dtype, DTYPES)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    if dtype is None and torch.device(device).type == "cpu":
        dtype = "float32"
    options: dict[str, Any] = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    path = str(folder_of(name_or_path))
    if name_or_path in PRESETS and not Path(path).exists():
        tokenizer = byte_tokenizer()
        config = preset(name_or_path, vocab_size=max(preset(name_or_path).vocab_size, len(tokenizer)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return DiffTransformerForCausalLM(config).to(device, **options).eval(), tokenizer
    return read_model(path, **options).to(device).eval(), read_tokenizer(path)


def configuration_of(name: str) -> Any:
    """The configuration of a model without its weights; None if it cannot be read, which loading the model explains."""
    path = Path(name).expanduser()
    if name in PRESETS and not path.exists():
        return preset(name)
    try:
        return AutoConfig.from_pretrained(folder_of(path) if path.exists() else name, trust_remote_code=False)
    except UNREADABLE:
        return None


def read_model(name_or_path: str | Path, model_class: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """``model_class.from_pretrained`` from safetensors only, with a check that no weight is missing.

    Args:
        options: of ``from_pretrained``.

    Raises:
        UserError: if there is no such model, or its weights are not in safetensors, damaged or incomplete.
    """
    options = {"trust_remote_code": False, "output_loading_info": True, "ignore_mismatched_sizes": True} | options
    try:
        model, info = model_class.from_pretrained(str(name_or_path), use_safetensors=True, **options)
    except UserError:
        raise
    except (*UNREADABLE, SafetensorError) as error:
        reason = "there is no such folder" if "Repo id must" in str(error) else first_line(error)
        advice = f"; only safetensors are read ({_ADVICE})" if "named" in reason else ""
        meant = did_you_mean(str(name_or_path), PRESETS)
        raise UserError(f"{name_or_path} cannot be loaded: {reason}{advice}{meant}") from None
    if wrong := wrong_weights(info):
        raise UserError(
            f"the weights in {name_or_path} are not those that {type(model).__name__} has by its configuration: {wrong}"
        )
    return model


def wrong_weights(info: dict[str, Any], *, unknown: bool = False) -> str:
    """The weights that are missing or of another shape, and with ``unknown`` those of no module; "" if there are none.

    Args:
        info: the second result of ``from_pretrained(..., output_loading_info=True)``.
    """
    shapes = [f"{key} {tuple(saved)}, not {tuple(size)}" for key, saved, size in info["mismatched_keys"]]
    kinds = {"missing": info["missing_keys"], "of another shape": shapes}
    kinds |= {"unknown": info["unexpected_keys"]} if unknown else {}
    return "; ".join(f"{len(names)} {kind}: {listed(sorted(names))}" for kind, names in kinds.items() if names)


def read_settings(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """The settings in ``folder / name``.

    Raises:
        UserError: if there is no such file, or it is not JSON.
    """
    if not (folder / name).exists():
        raise UserError(f"{folder} has no {name}; give the folder of a saved model")
    return read_json(folder / name, "copy or download it again")


def folder_of(model: str | Path) -> Path:
    """The folder ``model``, or its folder "model" if it is that of a finished run."""
    folder = Path(model).expanduser()
    return folder / "model" if (folder / "model" / "config.json").exists() else folder


def model_path(model: str) -> str:
    """``model`` as engines take it: the path of a folder with a model and its tokenizer, or a name on the hub."""
    folder = folder_of(model)
    if not folder.exists() and not model.startswith(("/", ".", "~")):
        return model
    for name in ("config.json", "tokenizer_config.json"):
        read_settings(folder, name)
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} holds no .safetensors file; {_ADVICE}")
    return str(folder)


def read_tokenizer(path: str) -> Any:
    """Load the tokenizer that is saved with a model, from a folder or the hub."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} has no tokenizer that can be read ({first_line(error)}); save one there") from None


@contextmanager
def plain_defaults(model: Any) -> Generator[None]:
    """Context manager that reduces the model's generation defaults to its special tokens.

    Otherwise ``generate`` would use each other default (``min_p``, ``num_return_sequences``, ...) that a call omits.
    """
    defaults = model.generation_config
    tokens = {name: getattr(defaults, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**tokens)
    try:
        yield
    finally:
        model.generation_config = defaults


def padding_token(model: Any, tokenizer: Any) -> int:
    """A token that the model can embed, for padding that a mask hides. A tokenizer may have more tokens than the model
    embeds, such as a ``[PAD]`` that was added later."""
    ends = model.generation_config.eos_token_id
    rows = model.get_input_embeddings().weight.shape[0]
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends]))
    return next((token for token in known if token is not None and token < rows), 0)


def fingerprint(model: Any) -> str:
    """12 hexadecimal digits of a model's weights: of at most 2047 values of each parameter, in fp32."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().flatten()
        values = values[:: max(1, len(values) // 1024)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]
