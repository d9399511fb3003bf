"""How a run is spread over processes: DDP, FSDP2 and tensor parallel, all applied from outside to a model that knows
one device.

Tensor parallel splits a layer by whole heads: the queries and keys of both maps of a head, its values, lambda and head
norm are on one process. The vocabulary of embedding and output matrix is split as well. What belongs to all heads of a
layer (lambda's vectors, the head norm's weight) is on every process, and its gradient is summed over them.
"""

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from diff_transformer.train.config import ParallelConfig, RunConfig
from diff_transformer.train.launch import torchrun_options
from diff_transformer.train.objective import Objective

SHARDED_PRECISIONS = ("32-true", "bf16-mixed")


@dataclass(frozen=True)
class Share:
    """This process's part of each batch: rows ``rank`` of ``size``. Tensor parallel processes have the same rows."""

    rank: int = 0
    size: int = 1

    def of(self, rows):
        """This process's rows of an array or tensor [rows, ...]; ``size`` divides the number of rows."""
        each = len(rows) // self.size
        return rows[self.rank * each : (self.rank + 1) * each]


def make_fabric(config: RunConfig) -> Fabric:
    """Fabric for the processes that the launcher (torchrun) started, or for this one alone; launched.

    Raises:
        ValueError: if the processes are not those that the configuration asks for, or do not divide the batch.
    """
    parallel, (processes, nodes) = config.train.parallel, _started(config.train.parallel)
    world = processes * nodes
    name = check_processes(config, world)
    strategy: Any = "auto"
    if name == "ddp":
        strategy = DDPStrategy(gradient_as_bucket_view=True)
    elif name == "fsdp":
        strategy = ModelParallelStrategy(
            partial(shard, precision=config.train.precision, compiled=config.train.compile),
            data_parallel_size=world // parallel.tensor_parallel,
            tensor_parallel_size=parallel.tensor_parallel,
            save_distributed_checkpoint=parallel.sharded_checkpoints,
        )
    precision: Any = config.train.precision
    fabric = Fabric(accelerator="auto", devices=processes, num_nodes=nodes, strategy=strategy, precision=precision)
    if world > 1 or name == "fsdp":
        fabric.launch()
    return fabric


def check_processes(config: RunConfig, world: int) -> str:
    """The strategy, "single", "ddp" or "fsdp", with which ``world`` processes train what ``config`` says.

    Raises:
        ValueError: if they do not divide the batch, or the strategy is not for so many or for the precision.
    """
    name = _strategy(config.train.parallel, world)
    _check_batch(config, world)
    if name == "fsdp" and config.train.precision not in SHARDED_PRECISIONS:
        raise ValueError(
            f"train.precision is {config.train.precision!r}; with parallel.strategy 'fsdp' accepted: "
            f"{', '.join(map(repr, SHARDED_PRECISIONS))}"
        )
    return name


def share_of(fabric: Fabric) -> Share:
    """This process's part of the batch."""
    if isinstance(fabric.strategy, ModelParallelStrategy):
        mesh = fabric.strategy.device_mesh["data_parallel"]
        return Share(mesh.get_local_rank(), mesh.size())
    return Share(fabric.global_rank, fabric.world_size)


def check_split(config, ways: int) -> None:
    """Raise ValueError unless tensor parallel can give each of ``ways`` processes whole heads of a model's layers."""
    if ways == 1:
        return
    heads = config.heads
    counts = {"output heads": heads.outputs, "value heads": heads.values, "key heads": heads.keys}
    if config.attention == "grouped_diff":
        counts["noise heads"] = heads.queries // (config.signal_heads_per_noise_head + 1)
    counts |= {"channels of intermediate_size": config.intermediate_size, "words of vocab_size": config.vocab_size}
    wrong = [f"{count} {name}" for name, count in counts.items() if count % ways]
    if wrong:
        raise ValueError(
            f"train.parallel.tensor_parallel is {ways}, which does not divide {', '.join(wrong)} of this model; a head "
            f"stays whole, with both its maps; give a tensor_parallel that divides them"
        )
    if getattr(config, "hidden_act", "silu") == "poly_norm":
        raise ValueError(
            f"hidden_act='poly_norm' takes a norm over the whole feed-forward width, which tensor_parallel={ways} "
            f"splits; give tensor_parallel=1"
        )


def shard(objective: Objective, mesh: DeviceMesh, *, precision: str, compiled: bool = False) -> Objective:
    """FSDP2 over the mesh's "data_parallel" dimension, tensor parallel over its "tensor_parallel" dimension.

    A layer is gathered when it is needed, in bf16 where ``precision`` is "bf16-mixed"; embedding, last norm and output
    matrix are gathered together, in their own precision. lambda's vectors are a group of their own that stays in fp32.
    """
    model: Any = objective.model
    tensor, data = mesh["tensor_parallel"], mesh["data_parallel"]
    if tensor.size() > 1:
        check_split(model.config, tensor.size())
        _split(model, tensor)
    if compiled:
        compile_layers(model)
    vectors = [module for module in model.modules() if _keeps_precision(module)]
    if vectors:
        fully_shard(vectors, mesh=data, reshard_after_forward=False)
    low = torch.bfloat16 if precision == "bf16-mixed" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=data, mp_policy=policy)
    fully_shard(objective, mesh=data)
    return objective


def reshard(module: nn.Module) -> None:
    """Give back what a forward pass without a backward pass left gathered; nothing where nothing is sharded."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def compile_layers(model: Any) -> None:
    """Compile each decoder layer by itself, so that gathering and gradient exchange overlap with the next one."""
    for layer in model.base_model.layers:
        layer.forward = torch.compile(layer.forward)


def _keeps_precision(module: nn.Module) -> bool:
    from diff_transformer.model.lambdas import LearnedLambda

    return isinstance(module, LearnedLambda)


def _split(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallel within the processes of ``mesh``."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # advice on its own internals
    whole, columns, rows = Replicate(), ColwiseParallel, RowwiseParallel
    once = partial(PrepareModuleInput, input_layouts=(whole,), desired_input_layouts=(whole,))
    for layer in model.base_model.layers:
        plan = {
            "self_attn": once(), "mlp": once(),  # so that the gradient of their input is summed once, not per matrix
            **{f"self_attn.{name}_proj": columns() for name in "qkv"}, "self_attn.o_proj": rows(),
            "mlp.gate_proj": columns(), "mlp.up_proj": columns(), "mlp.down_proj": rows(),
        }  # fmt: skip
        parallelize_module(layer, mesh, plan)
        _split_core(layer.self_attn.core, mesh)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _on_every_process(norm, mesh, whole)
    _on_every_process(model.base_model.norm, mesh, whole)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    parallelize_module(embedding, mesh, rows(input_layouts=whole))
    if tied:
        head.weight = embedding.weight
    else:
        parallelize_module(head, mesh, columns())


def _split_core(core: Any, mesh: DeviceMesh) -> None:
    """lambda and the head norm beside the heads that this process has."""
    from diff_transformer.model.lambdas import LearnedLambda, TokenLambda

    lam = getattr(core, "lam", None)
    if isinstance(lam, LearnedLambda):
        distribute_module(lam, mesh, output_fn=_shared_scalar)
    elif isinstance(lam, TokenLambda):
        parallelize_module(lam.proj, mesh, ColwiseParallel())
    if core.head_norm is not None and core.head_norm.weight is not None:
        _on_every_process(core.head_norm, mesh, Shard(2))  # [B, T, heads, width]


def _on_every_process(norm: nn.Module, mesh: DeviceMesh, placement) -> None:
    """A norm whose weight is on every process; ``placement``: how its input lies over them."""

    def enter(module: nn.Module, inputs: tuple, mesh: DeviceMesh):
        x, *others = inputs
        return DTensor.from_local(x, mesh, [placement], run_check=False), *others

    def leave(module: nn.Module, output: Any, mesh: DeviceMesh):
        return output.to_local()

    distribute_module(norm, mesh, input_fn=enter, output_fn=leave)


def _shared_scalar(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    """lambda as a plain scalar, whose gradient, of this process's heads alone, is to be summed over all."""
    return output.to_local(grad_placements=[Partial()]).clone()


def _started(parallel: ParallelConfig) -> tuple[int, int]:
    """Processes on this machine, and machines."""
    asked = {"devices": parallel.devices, "num_nodes": parallel.num_nodes}
    if not torch.distributed.is_torchelastic_launched():
        wanted = max(1, parallel.devices) * max(1, parallel.num_nodes)
        if wanted > 1:
            raise ValueError(
                f"train.parallel asks for {wanted} processes, this is one alone; start them with: "
                f"torchrun {' '.join(torchrun_options(parallel))} -m diff_transformer train ..."
            )
        return 1, 1
    here, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    there = {"devices": here, "num_nodes": world // here}
    for name, count in asked.items():
        if count not in (0, there[name]):
            raise ValueError(
                f"train.parallel.{name} is {count}, but torchrun started {there[name]}; give {there[name]}, or 0 for "
                f"whatever it starts"
            )
    return here, world // here


def _strategy(parallel: ParallelConfig, world: int) -> str:
    ways = parallel.tensor_parallel
    if world % ways:
        raise ValueError(
            f"train.parallel.tensor_parallel is {ways}, which does not divide the {world} processes; start "
            f"{ways * -(-world // ways)}, or give another tensor_parallel"
        )
    if parallel.strategy == "single" and world > 1:
        raise ValueError(f"train.parallel.strategy is 'single', but there are {world} processes; give 'ddp' or 'fsdp'")
    if parallel.strategy in ("single", "ddp") and ways > 1:
        raise ValueError(
            f"train.parallel.strategy is {parallel.strategy!r}, which excludes tensor_parallel={ways}; give 'fsdp'"
        )
    if parallel.strategy == "fsdp" or (parallel.strategy == "auto" and ways > 1):
        return "fsdp"
    return "single" if world == 1 else "ddp"


def _check_batch(config: RunConfig, world: int) -> None:
    parts = world // config.train.parallel.tensor_parallel * config.train.accumulate
    if config.train.batch_size % parts:
        raise ValueError(
            f"train.batch_size {config.train.batch_size} is not divisible by {parts}: "
            f"{parts // config.train.accumulate} processes with rows of their own, train.accumulate "
            f"{config.train.accumulate}; give a multiple of {parts}"
        )
