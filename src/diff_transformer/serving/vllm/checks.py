"""Refusals before vLLM loads a model, and checks of a checkpoint's tensors."""

import logging
from collections.abc import Iterable, Iterator

from torch import Tensor

from diff_transformer.checks import listed
from diff_transformer.errors import UserError
from diff_transformer.model.heads import HeadCounts

ARCHITECTURE = "DiffTransformerForCausalLM"
DIFFERENTIAL = ("DifferentialForCausalLM", "DifferentialMoEForCausalLM")  # made so in place, without and with experts
BUFFERS = ("rotary_emb.inv_freq", "rope.inv_freq")  # ends of names in older checkpoints; the configuration has them
TESTED = "0.32"  # the release of vLLM that the tests run on
OLDEST = (0, 32)
WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of heads, to pad to where a backend does not take one
# Model types of transformers that the tests compare, made differential, with transformers' own logits. vLLM 0.32 gives
# other logits than transformers for gpt_neox, and does not load gpt2 there, whatever their attention.
DIFFERENTIABLE = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "smollm3",
    "granite", "cohere", "cohere2", "starcoder2", "glm4", "olmo2", "olmo3", "phi", "phi3", "exaone4",
)  # fmt: skip

logger = logging.getLogger(__name__)


def check_version(version: tuple) -> None:
    """Raise RuntimeError for a vLLM that is older than the plugin's interface; warn of one that is newer than tested.

    Args:
        version: vLLM's version, ``(0, 32, 0)``. A build from source, ``(0, 1, "dev5")``, counts as the newest.
    """
    numbers = tuple(part for part in version[:2] if isinstance(part, int))
    from_source = any(isinstance(part, str) and "dev" in part for part in version)
    if numbers and numbers < OLDEST and not from_source:
        raise UserError(
            f"diff-transformer's plugin needs vLLM {TESTED} or newer, and this is {_dotted(version)}; "
            f"pip install 'vllm>={TESTED}'"
        )
    if numbers != tuple(map(int, TESTED.split("."))):
        logger.warning("diff-transformer's plugin was tested with vLLM %s, and this is %s", TESTED, _dotted(version))


def _dotted(version: tuple) -> str:
    return ".".join(map(str, version))


def check_config(config, name: str) -> None:
    """Raise ValueError for a configuration that the plugin cannot run; ``name`` is the folder or hub name."""
    if config.model_type != "diff_transformer":
        raise UserError(
            f"{name} names the architecture DiffTransformerForCausalLM, but its model_type is {config.model_type!r}; "
            "give a folder that save_pretrained or `diff-transformer convert` wrote"
        )
    if config.attention == "dint":
        raise UserError(
            f"{name} has attention='dint', whose running mean over all earlier queries has no place in vLLM's paged "
            "cache; use `diff-transformer serve --engine transformers`, or `diff-transformer generate`"
        )
    if config.core or config.qk_clip or config.head_scale != 1:
        raise UserError(
            f"{name} sets core, head_scale or qk_clip, which the plugin does not apply; use `diff-transformer serve "
            "--engine transformers`"
        )
    if config.attention == "grouped_diff" and config.heads.value_dim % 2:
        raise UserError(f"{name} has value_head_dim={config.value_head_dim}; the plugin takes an even one")
    if max(widths := head_widths(config)) > WIDTHS[-1]:
        raise UserError(too_wide(max(widths)))


def head_widths(config) -> tuple[int, int]:
    """Width of a key in vLLM's cache, 2d where two lie side by side, and of a value."""
    heads: HeadCounts = config.heads
    return heads.head_dim * heads.keys // heads.values, heads.value_dim


def too_wide(width: int) -> str:
    return (
        f"this model needs heads of width {width} in vLLM's cache (two keys side by side, or a value), which vLLM's "
        "attention does not take here; serve it with `diff-transformer serve --engine transformers`"
    )


def check_parallel(config, ranks: int) -> None:
    """Raise ValueError unless the heads of ``config`` divide among ``ranks`` tensor-parallel ranks.

    The two maps of a head, and a noise head with its signal heads, stay on one rank. Key/value heads are repeated where
    there are fewer than ranks, except those of ``grouped_diff``.
    """
    heads: HeadCounts = config.heads
    queries, keys = config.num_attention_heads, heads.values
    if config.attention == "diff":
        queries //= 2
    elif config.attention == "grouped_diff":
        queries = heads.queries - heads.outputs  # noise heads
    repeatable = config.attention != "grouped_diff"
    accepted = [
        n for n in range(1, queries + 1) if queries % n == 0 and (keys % n == 0 or (repeatable and n % keys == 0))
    ]
    if ranks not in accepted:
        raise UserError(
            f"tensor_parallel_size is {ranks}, which does not divide {queries} heads with {keys} key/value heads of "
            f"attention={config.attention!r}; sizes that fit: {', '.join(map(str, accepted))}"
        )


def check_differential(config, name: str) -> None:
    """Raise ValueError for a model made differential in place that vLLM's Transformers backend does not run."""
    kind, about = config.differential.get("kind"), f"{name} was made differential in place"
    if kind not in ("diff_v2", "diff_v3"):
        raise UserError(
            f"{about} as {kind!r}, each of whose maps has its own keys, and vLLM's cache would need values for each; "
            "use `diff-transformer serve --engine transformers`, or differentiate(model, 'diff_v2')"
        )
    if config.model_type not in DIFFERENTIABLE:
        raise UserError(
            f"{about} from a {config.model_type} model, which vLLM's Transformers backend is not known to compute "
            f"right; use `diff-transformer serve --engine transformers` (vLLM takes {', '.join(DIFFERENTIABLE)})"
        )


def check_differential_ranks(config, ranks: int) -> None:
    """Raise ValueError unless both maps of a head, and their keys and values, stay on one of ``ranks`` ranks."""
    plan, n, m = config.base_model_tp_plan or {}, config.num_attention_heads, config.num_key_value_heads
    styles = [plan.get(f"layers.*.self_attn.{name}_proj") for name in "qkvo"]
    by_heads = styles == ["colwise"] * 3 + ["rowwise"] and n % ranks == 0 and (m % ranks == 0 or ranks % m == 0)
    if ranks > 1 and not by_heads:
        raise UserError(
            f"tensor_parallel_size is {ranks}, which does not divide the {n} heads of this {config.model_type} model, "
            f"made differential in place, with their {m} key/value heads, or transformers' plan does not divide it by "
            "heads; leave it out"
        )


class CheckedWeights:
    """The names of a checkpoint's tensors, compared with those that its configuration asks for.

    vLLM fuses projections when it loads them, and does not notice when one part is missing.

    Args:
        expected: the names of the model's tensors.
        quantized: ``X.weight`` may be stored as other tensors of ``X``, such as ``X.weight_packed``.
    """

    def __init__(self, expected: Iterable[str], *, quantized: bool = False):
        self.expected, self.quantized = set(expected), quantized
        self.seen: set[str] = set()

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass on ``weights`` without buffers that no model keeps."""
        for name, tensor in weights:
            if not name.endswith(BUFFERS):
                self.seen |= {name, f"{name.rpartition('.')[0]}.weight"} if self.quantized else {name}
                yield name, tensor

    def require_all(self) -> None:
        """Raise UserError if the checkpoint lacked tensors."""
        if missing := sorted(self.expected - self.seen):
            raise UserError(
                f"the checkpoint lacks {len(missing)} of the model's {len(self.expected)} tensors: {listed(missing)}; "
                "copy or download it again"
            )
