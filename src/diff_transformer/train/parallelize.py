"""DDP, FSDP2 and tensor parallel, applied from outside to a model that is written for one device.

Tensor parallel splits a layer by whole heads: the queries and keys of both maps of a head, its values, lambda and head
norm are on one process. The vocabulary of the embedding and of the output matrix is split too. Parameters that all
heads of a layer share (lambda's vectors, the head norm's weight) are on every process, and their gradient is summed.
"""

import logging
import os
from functools import partial
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from diff_transformer.model.lambdas import LearnedLambda, TokenLambda
from diff_transformer.model.parts import layers_of
from diff_transformer.train.loss import Objective
from diff_transformer.train.plan import Plan
from diff_transformer.train.training_data import BatchPart
from diff_transformer.train.weights import merged


def make_fabric(plan: Plan) -> Fabric:
    """A launched Fabric for the processes that torchrun started, or for this process alone."""
    settings, strategy = plan.config.train, "auto"
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if plan.world > 1 else 1
    if plan.strategy == "ddp":
        strategy = DDPStrategy(gradient_as_bucket_view=True)
    elif plan.strategy == "fsdp":
        how = partial(
            shard, precision=settings.precision, compiled=settings.compile, replicas=settings.parallel.replicas
        )
        ways = settings.parallel.tensor_parallel
        strategy = ModelParallelStrategy(how, data_parallel_size=plan.world // ways, tensor_parallel_size=ways)
    fabric = Fabric(
        accelerator="auto", devices=here, num_nodes=plan.world // here, strategy=strategy, precision=settings.precision
    )
    if plan.world > 1 or plan.strategy == "fsdp":
        fabric.launch()
    return fabric


def batch_part(fabric: Fabric, context_parallel: int = 1) -> BatchPart:
    """This process's part of the batch; ``context_parallel`` consecutive processes have the same rows."""
    rank, size = fabric.global_rank, fabric.world_size
    if isinstance(fabric.strategy, ModelParallelStrategy):
        mesh = fabric.strategy.device_mesh["data_parallel"]
        rank, size = mesh.get_local_rank(), mesh.size()
    return BatchPart(rank // context_parallel, size // context_parallel)


def shard(
    objective: Objective, mesh: DeviceMesh, *, precision: str, compiled: bool = False, replicas: int = 1
) -> Objective:
    """FSDP2 over the mesh's "data_parallel" dimension, tensor parallel over its "tensor_parallel" dimension.

    With several ``replicas`` (HSDP), weights are shared by the processes of a replica, and gradients summed over all.
    A layer is gathered when it is needed, in bf16 if ``precision`` is "bf16-mixed". Embedding, last norm and output
    matrix are gathered together, in their own precision. Lambda's vectors are a separate group, which stays in fp32.
    """
    model: Any = objective.model
    tensor, data = mesh["tensor_parallel"], mesh["data_parallel"]
    if replicas > 1:
        sizes = (replicas, data.size() // replicas, tensor.size())
        mesh = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("replica", "shard", "tensor_parallel"))
        tensor, data = mesh["tensor_parallel"], mesh["replica", "shard"]
    if tensor.size() > 1:
        _split(model, tensor)
    if compiled:
        compile_layers(model)
    vectors: list[nn.Module] = [module for module in model.modules() if isinstance(module, LearnedLambda)]
    if vectors:
        fully_shard(vectors, mesh=data, reshard_after_forward=False)
    low = torch.bfloat16 if precision == "bf16-mixed" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers_of(model):
        fully_shard(layer, mesh=data, mp_policy=policy)
    fully_shard(objective, mesh=data)
    return objective


def is_sharded(model: nn.Module) -> bool:
    """True if some parameter is a DTensor."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_model(model: Any, first: bool) -> Any:
    """The finished model in eval mode, ready for generation. Every process calls it.

    For a sharded model: a whole copy on the process that is ``first``, None on the others.
    """
    if is_sharded(model):
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if not first:
            return None
        dtype = model.dtype
        model = type(model)(model.config)
        model.to(dtype).load_state_dict(weights)
    for layer in layers_of(model):
        vars(layer).pop("forward", None)  # of training: each length and batch would be compiled again
    model.config.use_cache = True
    return merged(model).eval()


def reshard(module: nn.Module) -> None:
    """Free the parameters that a forward pass without a backward pass left gathered; for FSDP2."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def sum_over_replicas(module: nn.Module, wanted: bool) -> None:
    """True if backward passes sum gradients over replicas (HSDP); those before the last of a step need not."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_requires_all_reduce(wanted, recurse=False)


def compile_layers(model: Any) -> None:
    """Compile each decoder layer separately: two graphs serve any number of layers, which compiles a deep model many
    times faster, and sharded layers overlap all-gather and gradient reduction with the next layer."""
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward)


def _split(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallel within the processes of ``mesh``."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # silences its advice
    whole, columns, rows = Replicate(), ColwiseParallel, RowwiseParallel
    once = partial(PrepareModuleInput, input_layouts=(whole,), desired_input_layouts=(whole,))
    for layer in model.base_model.layers:
        plan = {
            "self_attn": once(), "mlp": once(),  # sums the gradient of their input once, not per matrix
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
    """Lambda and the head norm of the heads that this process has."""
    if isinstance(core.lam, LearnedLambda):
        distribute_module(core.lam, mesh, output_fn=_shared_scalar)
    for sigmoids in (core.lam, core.gates):
        if isinstance(sigmoids, TokenLambda):
            parallelize_module(sigmoids.proj, mesh, ColwiseParallel())
    if core.head_norm is not None and core.head_norm.weight is not None:
        _on_every_process(core.head_norm, mesh, Shard(2))  # [B, T, heads, width]


def _on_every_process(norm: nn.Module, mesh: DeviceMesh, placement) -> None:
    """Replicate a norm's weight; ``placement`` says how its input is distributed."""

    def enter(module: nn.Module, inputs: tuple, mesh: DeviceMesh):
        x, *others = inputs
        return DTensor.from_local(x, mesh, [placement], run_check=False), *others

    def leave(module: nn.Module, output: Any, mesh: DeviceMesh):
        return output.to_local()

    distribute_module(norm, mesh, input_fn=enter, output_fn=leave)


def _shared_scalar(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    """Lambda as a plain scalar. Its gradient, which covers this process's heads, is summed over the processes."""
    return output.to_local(grad_placements=[Partial()]).clone()
