"""vLLM's hook for a model's configuration."""

from vllm import __version_tuple__ as version
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from diff_transformer.serving.vllm.checks import check_config, check_parallel, check_version


class ConfigCheck(VerifyAndUpdateConfig):
    """vLLM calls this with the configuration of each model of our architecture, before it starts an engine."""

    @staticmethod
    def verify_and_update_config(vllm_config) -> None:
        """Raise what ``check_version``, ``check_config`` and ``check_parallel`` raise."""
        config = vllm_config.model_config.hf_config
        check_version(version)
        check_config(config, vllm_config.model_config.model)
        check_parallel(config, vllm_config.parallel_config.tensor_parallel_size)
        if vllm_config.lora_config is not None and config.heads.value_dim * config.heads.values != (
            config.heads.head_dim * config.heads.keys
        ):
            raise ValueError(
                f"LoRA in vLLM takes values that are as wide as keys, and value_head_dim is {config.value_head_dim}; "
                "merge the adapter into the model (peft's merge_and_unload), and serve that"
            )
