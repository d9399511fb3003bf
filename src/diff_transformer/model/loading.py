"""Load a saved model: only from safetensors (reading a pickle can run code), and only with all of its weights."""

import hashlib
import logging
import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diff_transformer.checks import did_you_mean, first_line, listed
from diff_transformer.model.presets import PRESETS, preset
from diff_transformer.model.saved import (
    ONLY_SAFETENSORS,
    check_files,
    check_sizes,
    shapes_of_files,
    unreadable,
    weight_files,
)

DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("int8",)
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
# What transformers raises for settings of which no model can be built.
_OF_SETTINGS = (AttributeError, LookupError, ArithmeticError, TypeError, MemoryError, RecursionError, AssertionError)


def load_model(
    name_or_path: str, *, device: str | None = None, dtype: str | None = None, weights: str | None = None
) -> tuple[Any, Any]:
    """Load a causal LM in eval mode and its tokenizer from a folder, the hub, or a preset (untrained, byte tokenizer).

    Args:
        device: "cpu", "cuda", ...; None takes CUDA if available.
        dtype: "float32", "bfloat16" or "float16"; None keeps that of the checkpoint. Lambda stays fp32.
        weights: "int8" keeps the matrices in 8 bits (``model/int8.py``) and computes in ``dtype``; None keeps them as
            saved.

    Raises:
        FileNotFoundError: for a path that does not exist, or a name that the hub does not have.
        ValueError: for an unknown dtype, device or kind of weights; for missing, damaged or incomplete safetensors; for
            a tokenizer that cannot be read.
        RuntimeError: if a library that the checkpoint needs is not installed.
    """
    import torch

    import diff_transformer.model.modeling  # noqa: F401  (registers the model class)

    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype is {dtype!r}; give {', '.join(DTYPES)}")
    if weights not in (None, *WEIGHTS):
        raise ValueError(
            f"weights are {weights!r}; give {', '.join(WEIGHTS)}, or leave it out for those of the checkpoint"
        )
    wanted = None if dtype is None else getattr(torch, dtype)
    device = _device(device)
    if name_or_path in PRESETS and not Path(name_or_path).exists():
        return _untrained(name_or_path, device, wanted, weights)
    if name_or_path.startswith((".", "/", "~")) and not Path(name_or_path).expanduser().exists():
        raise FileNotFoundError(
            f"no model at {name_or_path}; give a folder written by save_pretrained, a hub name or a preset"
        )
    path = str(Path(name_or_path).expanduser()) if name_or_path.startswith("~") else name_or_path
    options: dict[str, Any] = {} if wanted is None else {"dtype": wanted}
    if weights == "int8":
        from diff_transformer.model.int8 import int8_config

        options["quantization_config"] = int8_config()
    return read_model(path, **options).to(device).eval(), read_tokenizer(path)


def read_model(
    name_or_path: str | Path, model_class: Any = None, *, presets: Collection[str] = PRESETS, **options: Any
) -> Any:
    """``model_class.from_pretrained`` from safetensors only, with a check that no weight is missing.

    Args:
        model_class: ``AutoModelForCausalLM`` if None.
        presets: names that the caller also accepts, for the message if there is no such model.
        options: of ``from_pretrained``. With ``output_loading_info`` the model and the loading info are returned, and
            the caller must check for missing weights.

    Raises:
        ValueError: if safetensors are missing, damaged or incomplete.
        FileNotFoundError: if there is no such model.
        RuntimeError: if a library that the checkpoint needs is not installed.
    """
    if model_class is None:
        from transformers import AutoModelForCausalLM as model_class

        import diff_transformer.model.modeling  # noqa: F401  (registers the model class)

    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    folder = Path(name_or_path)
    if folder.is_dir():
        check_files(folder)
        check_sizes(folder, shapes_of_files(folder))
    else:
        require_reachable(str(name_or_path), presets)
    caller_judges = options.pop("output_loading_info", False)
    fixed = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    options.setdefault("trust_remote_code", False)  # else transformers asks the user, who may say yes
    try:
        with reports_held_back() as reports:
            both: Any = model_class.from_pretrained(str(name_or_path), **options, **fixed)
            model, found = both
            if caller_judges or _complaint(name_or_path, model, found):
                reports.clear()  # one message below says it
    except ValueError as error:
        if "custom code" in str(error):
            raise ValueError(
                f"{name_or_path} brings its own code, which does not run here; give the model that it was exported "
                "from, convert it (`diff-transformer convert` takes Motif's), or load it in Python with "
                "trust_remote_code=True"
            ) from None
        raise
    except ImportError as error:
        raise RuntimeError(f"{name_or_path} cannot be read here: {error}") from None
    except SafetensorError as error:  # of a file in the hub's cache
        raise unreadable(folder, error) from None
    except (*_OF_SETTINGS, StrictDataclassError) as error:
        said = " ".join(str(error).split()) if isinstance(error, StrictDataclassError) else first_line(error)
        raise ValueError(
            f"the config.json of {name_or_path} describes no model that can be built ({said}); give the one that the "
            "model was saved with"
        ) from error
    except OSError as error:
        told = first_line(error)
        if "safetensors" in str(error):
            raise ValueError(f"{name_or_path} has no safetensors ({told}). {ONLY_SAFETENSORS}") from None
        raise FileNotFoundError(_no_model(name_or_path, told, presets)) from None
    if caller_judges:
        return model, found
    require_all_weights(name_or_path, model, found)
    return model


def require_all_weights(name: object, model: Any, found: Mapping[str, Any]) -> None:
    """Check that every weight of ``model`` came from ``name``: transformers initialises missing ones at random.

    Tied weights, and those that the model's class declares optional, do not count as missing. Layers of the file that
    the model does not have count as wrong: a part of a model answers nonsense.

    Args:
        found: the loading info that ``from_pretrained`` returns with ``output_loading_info``.

    Raises:
        ValueError: naming the first weights that are missing or have another shape, and their number.
    """
    complaint = _complaint(name, model, found)
    if complaint:
        raise ValueError(complaint)


def _complaint(name: object, model: Any, found: Mapping[str, Any]) -> str | None:
    wrong, layers = misfits(found, unexpected=False), getattr(model.config, "num_hidden_layers", None)
    if wrong:
        return (
            f"the weights in {name} are not all of those that {type(model).__name__} has by its config.json: {wrong}. "
            "They would be random; give a causal language model with the config.json and all the files that it was "
            "saved with"
        )
    extra = [key for key in found["unexpected_keys"] if (at := _LAYER.search(key)) and int(at[1]) >= (layers or 10**9)]
    if not extra:
        return None
    return (
        f"{name} has weights of more layers than the {layers} of its config.json: {listed(sorted(extra))}; give the "
        "config.json that the model was saved with"
    )


def misfits(found: Mapping[str, Any], *, unexpected: bool = True) -> str:
    """Describe the missing, misshapen and (with ``unexpected``) unknown weights that ``from_pretrained`` found."""
    shapes = [f"{key} {tuple(there)} (expected {tuple(here)})" for key, there, here in found["mismatched_keys"]]
    kinds = {"missing": found["missing_keys"], "of another shape": shapes}
    if unexpected:
        kinds["not of the model"] = found["unexpected_keys"]
    return "; ".join(f"{len(names)} {kind}: {listed(sorted(names))}" for kind, names in kinds.items() if names)


@contextmanager
def reports_held_back() -> Generator[list[logging.LogRecord]]:
    """Context manager that collects transformers' log records about loading; those left in the list are logged at the
    end."""
    logger, records = logging.getLogger("transformers.modeling_utils"), []

    def keep(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger.addFilter(keep)
    try:
        yield records
    finally:
        logger.removeFilter(keep)
        for record in records:
            logger.handle(record)


def require_reachable(name: str, presets: Collection[str] = PRESETS) -> None:
    """Ask the hub once for a model that is not cached; a download would retry many times.

    Args:
        presets: as in ``read_model``.

    Raises:
        FileNotFoundError: if the hub has no such model or does not answer.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    try:
        if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        HfApi().model_info(name, timeout=10)
    except Exception as error:  # the client may use any network library
        raise FileNotFoundError(_no_model(name, first_line(error), presets)) from None


def _no_model(name: str | Path, told: str, presets: Collection[str]) -> str:
    others = f", or a preset: {', '.join(presets)}" if presets else ""
    return (
        f"no model called {name}{did_you_mean(str(name), presets)} ({told}); give a folder written by save_pretrained, "
        f"or a name on the hub that is cached or can be downloaded{others}"
    )


def model_path(model: str) -> str:
    """``model`` as engines take it: the path of a folder that can hold a model, or a name on the hub.

    Raises:
        FileNotFoundError: for a folder that is not there, or has no configuration or tokenizer; for a name that the hub
            does not have.
    """
    folder = Path(model).expanduser()
    if not folder.exists():
        if model.startswith(("/", ".", "~")):
            raise FileNotFoundError(f"no model at {model}; give the folder of a saved model, or a name on the hub")
        require_reachable(model, presets=())
        return model
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{model} has no config.json; give the folder of a saved model")
    if not (folder / "tokenizer_config.json").exists():
        raise FileNotFoundError(f"{model} has no tokenizer; save one into the same folder (tokenizer.save_pretrained)")
    check_files(folder)
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


def _untrained(name: str, device: str, dtype: Any, weights: str | None) -> tuple[Any, Any]:
    import torch

    from diff_transformer.data.tokenizer import byte_tokenizer
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = preset(name)
    model = DiffTransformerForCausalLM(preset(name, vocab_size=max(config.vocab_size, len(tokenizer))))
    model = model.to(device=device, dtype=dtype or model.dtype).eval()
    if weights == "int8":
        from diff_transformer.model.int8 import quantize_int8

        quantize_int8(model)
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
        raise ValueError(
            f"{path} has no tokenizer that can be read ({first_line(error)}); save it beside the model with "
            "save_pretrained, or copy or download it again"
        ) from None


def _device(device: str | None) -> str:
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device is {device!r}; give cpu, cuda or cuda:0") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, and PyTorch finds no CUDA device here; give cpu")
    return device
