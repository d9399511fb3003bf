"""The model trains under transformers' own Trainer, and in the FSDP units that accelerate makes."""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from diff_transformer import DiffTransformerForCausalLM, differentiate
from diff_transformer.model.presets import preset

IDS = torch.randint(3, 97, (4, 12), generator=torch.Generator().manual_seed(0))


def test_gradients_do_not_depend_on_accumulation(tmp_path):
    """Four rows in one batch, and in four."""
    labels = [torch.where(torch.arange(12) < 3 * i + 1, -100, IDS[i]) for i in range(4)]
    rows = [{"input_ids": IDS[i], "labels": labels[i]} for i in range(4)]
    seen = []
    for batch in (4, 1):
        torch.manual_seed(0)
        model = DiffTransformerForCausalLM(preset("debug", pad_token_id=0))
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=batch, report_to="none", use_cpu=True,
            gradient_accumulation_steps=4 // batch, logging_steps=1, save_strategy="no", disable_tqdm=True,
            max_grad_norm=1e9, learning_rate=0.0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        log = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
        seen.append((log["loss"], float(log["grad_norm"])))
    assert seen[1] == pytest.approx(seen[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["ours", "differentiated"])
@pytest.mark.parametrize("version", [1, 2])
def test_bf16_weights_train_in_the_units_that_accelerate_makes(kind, version, tmp_path):
    """FSDP flattens the parameters of a unit together, so lambda's fp32 vectors need one of their own."""
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(preset("debug"))
    if kind == "differentiated":
        sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        model = differentiate(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)), "diff")
    model = model.bfloat16()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        if version == 1:
            model = FullyShardedDataParallel(
                model, auto_wrap_policy=plugin.auto_wrap_policy, use_orig_params=True, device_id=torch.device("cpu")
            )
        else:
            mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
            for module in reversed(list(model.modules())):
                if type(module).__name__ == "LearnedLambda" or type(module).__name__.endswith("DecoderLayer"):
                    fully_shard(module, mesh=mesh)
            fully_shard(model, mesh=mesh)
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients = [p.grad for name, p in model.named_parameters() if "lambda_q1" in name]
        assert len(gradients) == 2
        assert all(gradient.dtype == torch.float32 and gradient.any() for gradient in gradients)
    finally:
        dist.destroy_process_group()
