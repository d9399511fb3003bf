"""The vLLM plugin: ``vllm serve FOLDER`` and ``vllm.LLM(FOLDER)`` for models of this package.

vLLM finds ``register`` through the entry point ``vllm.general_plugins`` and calls it in each of its processes.
"""

ARCHITECTURE = "DiffTransformerForCausalLM"


def register() -> None:
    """Tell vLLM of the architecture, of the configuration class, and of the checks before a model is loaded.

    A model of another architecture is not affected, whatever the version of vLLM.
    """
    from vllm import ModelRegistry

    import diff_transformer  # noqa: F401  (registers the configuration with transformers)

    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:{ARCHITECTURE}")
    try:
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from diff_transformer.serving.vllm.config_check import ConfigCheck
    except ImportError:  # another version of vLLM: the model says so when it is loaded
        return
    MODELS_CONFIG_MAP[ARCHITECTURE] = ConfigCheck
