"""vLLM's hooks for a model's configuration."""

from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.transformers_utils.config import HFConfigParser
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from diff_transformer.serving.vllm.checks import (
    DIFFERENTIAL,
    check_config,
    check_differential,
    check_differential_ranks,
    check_parallel,
)


class ConfigCheck(VerifyAndUpdateConfig):
    """vLLM calls this with the configuration of each model of our architecture, before it starts an engine."""

    @staticmethod
    def verify_and_update_config(vllm_config) -> None:
        """Raise what ``check_config`` and ``check_parallel`` raise."""
        config = vllm_config.model_config.hf_config
        check_config(config, vllm_config.model_config.model)
        check_parallel(config, vllm_config.parallel_config.tensor_parallel_size)


class DifferentialParser(HFConfigParser):
    """vLLM's reader of ``config.json``; a model made differential in place gets our class as its architecture."""

    def parse(self, model, *args, **kwargs):
        values, config = super().parse(model, *args, **kwargs)
        if getattr(config, "differential", None) is not None:
            experts = ModelArchConfigConvertorBase(config, config).get_num_experts()
            config.architectures = [DIFFERENTIAL[experts > 0], *(config.architectures or ())]
        return values, config


class DifferentialCheck(VerifyAndUpdateConfig):
    """The checks of ``ConfigCheck`` for models made differential in place."""

    @staticmethod
    def verify_and_update_model_config(model_config) -> None:
        """Count the queries of both maps as heads. Raises what ``check_differential`` raises."""
        check_differential(model_config.hf_config, model_config.model)
        model_config.model_arch_config.total_num_attention_heads = 2 * model_config.hf_config.num_attention_heads

    @staticmethod
    def verify_and_update_config(vllm_config) -> None:
        """Raise what ``check_differential_ranks`` raises."""
        check_differential_ranks(vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size)
