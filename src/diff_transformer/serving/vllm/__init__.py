"""The vLLM plugin: ``vllm serve MODEL`` and ``vllm.LLM(MODEL)`` for models of this package, for DiffLlama and
Motif, and for decoders of transformers that ``differentiate`` changed.

vLLM finds ``register`` through the entry point ``vllm.general_plugins`` and calls it in each of its processes.
"""


def register() -> None:
    """Tell vLLM of the architectures, of their configurations, and of the checks before a model is loaded.

    A model of another architecture is not affected, whatever the version of vLLM.
    """
    from vllm import ModelRegistry

    import diff_transformer  # noqa: F401  (registers the configuration with transformers)
    from diff_transformer.serving.vllm.checks import ARCHITECTURE, DIFFERENTIAL
    from diff_transformer.serving.vllm.published import ARCHITECTURES, MODEL_TYPES, PublishedConfig

    architectures = (ARCHITECTURE, *ARCHITECTURES.values())
    for name in architectures:
        ModelRegistry.register_model(name, f"{__name__}.model:{ARCHITECTURE}")
    for name in DIFFERENTIAL:
        ModelRegistry.register_model(name, f"{__name__}.differential:{name}")
    try:
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP
        from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER, _CONFIG_REGISTRY

        from diff_transformer.serving.vllm.config_check import ConfigCheck, DifferentialCheck, DifferentialParser
    except ImportError:  # another version of vLLM, whose own models must not suffer
        return
    MODELS_CONFIG_MAP.update(dict.fromkeys(architectures, ConfigCheck))
    MODELS_CONFIG_MAP.update(dict.fromkeys(DIFFERENTIAL, DifferentialCheck))
    _CONFIG_REGISTRY.update(dict.fromkeys(MODEL_TYPES, PublishedConfig))
    _CONFIG_FORMAT_TO_CONFIG_PARSER["hf"] = DifferentialParser
