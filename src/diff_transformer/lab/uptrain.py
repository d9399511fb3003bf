"""``compare --from``: the models that go on from one pretrained Transformer, which start with its logits.

Side "softmax" is the source itself. The arms beside it are what it is made into ("diff", "diff_v2", "diff_v3", "dex"),
the control "wider", which has as many parameters as "diff", and other ways to train it ("attention", "lora"). Side
"source" is measured and not trained. As all start with its logits, it is every arm's starting point.
"""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError

from diff_transformer.checks import first_line, require_known
from diff_transformer.durable import replacing
from diff_transformer.errors import UserError
from diff_transformer.lab.sides import SOURCE, WIDER
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.folder import (
    PACKAGE,
    carry_over,
    convert_folder,
    layout_of,
    model_without_weights,
    package_config,
)
from diff_transformer.model.convert.from_softmax import nearest, to_differential
from diff_transformer.model.dex import trained_by_dex
from diff_transformer.model.differentiate import differentiate
from diff_transformer.model.loading import model_path, read_model, read_tokenizer
from diff_transformer.model.parts import DEX, ENTRY
from diff_transformer.model.wider import wider
from diff_transformer.train.config import RunConfig
from diff_transformer.train.plan import check_trainable
from diff_transformer.train.recompute import ATTENTION_DROPOUT

# Settings of a model's form, which is the source's.
_SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "value_head_dim", "vocab_size", "tie_word_embeddings", "attention",
)  # fmt: skip
# What an arm makes of the source, and the weights that it trains; None is ``train.weights``.
ARMS: dict[str, tuple[str, str | None]] = {
    "diff": ("diff", None), "diff_v2": ("diff_v2", None), "diff_v3": ("diff_v3", None), DEX: (DEX, "dex"),
    WIDER: (WIDER, None), "attention": ("softmax", "attention"), "lora": ("softmax", "lora"),
}  # fmt: skip
USUAL = ("diff", "diff_v2", WIDER)
FOLDER = "initial"  # of a comparison, with a folder for each model that training starts from


@dataclass(frozen=True)
class Source:
    """A pretrained Transformer, and what goes on from it.

    Attributes:
        folder: of the model and its tokenizer. Nothing is written there.
        origin: its layout, as of ``convert_folder``; None for a model that keeps its class.
        models: fields of ``DiffTransformerConfig`` by side; of a model that keeps its class the nearest ones.
        no_control: why there is no "wider"; "" if there is.
        dropout: names of the configuration's settings of attention dropout, which every side is trained without.
    """

    folder: Path
    origin: str | None
    models: dict[str, dict[str, Any]]
    no_control: str = ""
    dropout: tuple[str, ...] = ()

    def run(self, config: RunConfig, side: str, seed: int, out: Path) -> RunConfig:
        """The run of a side and seed in the comparison ``out`` of ``config``, as ``configured`` returned it."""
        changed = {name: value for name, value in config.model.items() if self.models["softmax"].get(name) != value}
        initial, weights = str(self._initial(side, out)), ARMS.get(side, ("", None))[1] or config.train.weights
        train = dataclasses.replace(config.train, initial_model=initial, weights=weights, seed=config.train.seed + seed)
        model = self.models[side] | ({} if side == DEX else changed)  # DEX keeps the source's class and configuration
        return dataclasses.replace(config, model=model, train=train)

    def configured(self, config: RunConfig) -> RunConfig:
        """``config`` of a comparison of the source's models: with its sizes and tokenizer.

        Raises:
            ValueError: for settings that do not fit the source.
        """
        if config.data.tokenizer not in ("bpe", str(self.folder)):
            raise UserError(
                f"data.tokenizer is {config.data.tokenizer}, and a pretrained model keeps its own; leave it out"
            )
        if config.train.initial_model not in (None, str(self.folder)):
            raise UserError(f"train.initial_model is {config.train.initial_model}; leave it out, --from is the model")
        if config.train.weights == "dex":
            raise UserError("train.weights is 'dex', which softmax attention has not; give --arms dex")
        if config.evaluation.recall_steps:
            raise UserError("evaluation.recall_steps trains small models from random weights; set it to 0 with --from")
        fields = {**self.models["softmax"], **config.model}
        other = [
            name for name in _SHAPE if name in config.model and config.model[name] != self.models["softmax"].get(name)
        ]
        if other and self.origin is not None:
            raise UserError(
                f"model.{other[0]} of the recipe or --set is {config.model[other[0]]}, and {self.folder} has "
                f"{self.models['softmax'].get(other[0])}; leave it out"
            )
        changed = [name for name, value in config.model.items() if self.models["softmax"].get(name) != value]
        if changed and DEX in self.models:
            raise UserError(
                f"model.{changed[0]}: the arm 'dex' keeps the source's configuration; leave one of them out"
            )
        positions = fields.get("max_position_embeddings", config.data.length)
        if positions < config.data.length:
            raise UserError(f"data.length is {config.data.length}, and {self.folder} has {positions} positions")
        if config.model and self.origin is None:
            raise UserError(
                f"the recipe or --set has model.{next(iter(config.model))}, and {self.folder} keeps its class and its "
                "configuration; leave it out"
            )
        data = dataclasses.replace(config.data, tokenizer=str(self.folder))
        train = dataclasses.replace(config.train, initial_model=None)
        return dataclasses.replace(config, model=fields, data=data, train=train)

    def write(self, out: Path) -> None:
        """Write the folders that training starts from, unless they are there."""
        for side in dict.fromkeys(("softmax", *(ARMS[side][0] for side in self.models if side in ARMS))):
            place = self._initial(side, out)
            if place.exists():
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if side == WIDER:
                self._write(wider(read_model(self._initial("softmax", out), dtype="auto")), place)
            elif self.dropout and (side == DEX or (side == "softmax" and self.origin is None)):
                model = read_model(self.folder, dtype="auto")
                model.config.update(dict.fromkeys(self.dropout, 0.0))
                self._write(differentiate(model, DEX) if side == DEX else model, place)
            else:
                convert_folder(self.folder, place, target=PACKAGE if side == "softmax" else side)

    def _initial(self, side: str, out: Path) -> Path:
        side = "softmax" if side == SOURCE else ARMS.get(side, (side,))[0]
        kept = side == "softmax" and self.origin in (PACKAGE, None) and not self.dropout
        return self.folder if kept else out.resolve() / FOLDER / side

    def _write(self, model: Any, place: Path) -> None:
        with replacing(place) as folder:
            model.save_pretrained(folder)
            carry_over(self.folder, folder)


def read_source(name: str | Path, arms: Sequence[str] = USUAL) -> Source:
    """The model in a folder, or of a name on the hub that is cached or can be downloaded, to go on from.

    Args:
        arms: what is trained beside it, of ``ARMS``.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: for GGUF, quantised weights, a folder without a tokenizer, or a model that cannot be differential.
    """
    for arm in arms:
        require_known("arm", arm, ARMS)
    folder = _folder(name)
    read_tokenizer(str(folder))
    softmax, dropout = package_config(folder), ()
    model = model_without_weights(folder)
    origin = None if softmax is None else layout_of(folder)[0]
    if softmax is None:  # it keeps its class
        check_trainable(folder, model)
        softmax = nearest(model.config)
    if softmax.attention != "softmax" or hasattr(model.config, ENTRY):
        raise UserError(f"{folder} holds a differential model; give the softmax Transformer that it was made from")
    if origin is None or DEX in arms:  # a class that has attention dropout
        dropout = tuple(name for name in ATTENTION_DROPOUT if getattr(model.config, name, 0))
    models: dict[str, Any] = {"softmax": softmax}
    no_control = ""
    for arm in arms:
        kind = ARMS[arm][0]
        if kind == WIDER:
            try:
                control = wider(model).config
                if origin is None:
                    control.validate()  # as saving in its class does
                models[arm] = _with_heads_of(softmax, control)
            except (ValueError, StrictDataclassError) as error:
                no_control = first_line(error)
        elif kind == DEX:  # it keeps the source's class
            trained_by_dex(differentiate(copy.deepcopy(model), DEX))
            models[arm] = nearest(model.config)
        else:
            models[arm] = softmax if kind == "softmax" else to_differential(softmax, kind).config
    models[SOURCE] = softmax
    fields = {side: _fields(config) for side, config in models.items()}
    return Source(folder, origin, fields, no_control, dropout)


def _fields(config: DiffTransformerConfig) -> dict[str, Any]:
    """All but the tokens that the tokenizer says."""
    special = ("pad_token_id", "bos_token_id", "eos_token_id")
    names = [name for name in DiffTransformerConfig.__annotations__ if name not in special]
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def _with_heads_of(config: DiffTransformerConfig, other: Any) -> DiffTransformerConfig:
    shown = copy.deepcopy(config)
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        setattr(shown, name, getattr(other, name))
    return shown


def _folder(name: str | Path) -> Path:
    path = model_path(str(name))
    if not Path(path).exists():
        try:
            path = snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"])
        except Exception as error:  # the client may use any network library
            raise UserError(f"no model called {name} ({first_line(error)}); give a folder or another name") from None
    return Path(path).resolve()
