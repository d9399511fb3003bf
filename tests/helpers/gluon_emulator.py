"""A small CPU emulator of Gluon that runs the code of the Hopper kernels.

Gluon has no interpreter. The emulator runs the Python of the kernels with stand-ins for ``gl``, ``tma``, ``mbarrier``
and the wgmma calls. The groups of warps are threads of which one runs at a time, chosen by a seeded generator; TMA
copies land at a random later time and the memory they will fill holds NaN until then; a wgmma reads its operands as
late as its wait allows, and refuses what was stored without a fence. So a wrong phase, slot or arrival count, or a
missing fence, ends in a deadlock, an error or a wrong number.
"""

import builtins
import random
import sys
import threading
from itertools import product
from types import FunctionType, SimpleNamespace

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diff_transformer.ops.hopper import pipeline


class Int(int):
    """A 32-bit integer of the kernel; division and remainder of negative numbers differ from Python's: not allowed."""

    def __new__(cls, value):
        assert -(2**31) <= value < 2**31, f"{value} overflows int32"
        return super().__new__(cls, value)

    def to(self, dtype):
        return int(self)


def _integer_operation(name):
    def method(self, other):
        result = getattr(int, name)(self, other)
        if name in ("__floordiv__", "__mod__") and not isinstance(other, torch.Tensor):
            assert self >= 0, f"{self} is negative"
            assert other > 0, f"divided by {other}"
        return Int(result) if isinstance(other, Int) else result if result is NotImplemented else Int(result)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "xor", "rshift", "radd", "rsub", "rmul"):
    setattr(Int, f"__{_name}__", _integer_operation(f"__{_name}__"))


class Deadlock(Exception):
    """Every group of warps waits and no copy is on its way."""


class Machine:
    """One program's groups of warps, taking turns at random, and the copies that have been started."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.copies, self.agents, self.error = [], [], None
        self.stored = []  # of all shared memory that was stored to, who made no fence yet
        self.local = threading.local()

    def run(self, functions):
        main = threading.Semaphore(0)
        for function, arguments in functions:
            agent = SimpleNamespace(turn=threading.Semaphore(0), blocked=None, done=False, products=[])
            agent.thread = threading.Thread(target=self._work, args=(agent, main, function, arguments), daemon=True)
            self.agents.append(agent)
            agent.thread.start()
        while not all(agent.done for agent in self.agents):
            choices = [a for a in self.agents if not a.done and (a.blocked is None or a.blocked())]
            if self.copies and (not choices or self.random.random() < 0.3):
                self.copies.pop(self.random.randrange(len(self.copies)))()
                continue
            if not choices:
                raise Deadlock
            self.random.choice(choices).turn.release()
            main.acquire()
            if self.error is not None:
                raise self.error
        assert not self.copies, "the program ended with copies under way"
        assert not any(agent.products for agent in self.agents), "the program ended with products under way"

    def _work(self, agent, main, function, arguments):
        self.local.agent, self.local.main = agent, main
        agent.turn.acquire()
        try:
            with torch.no_grad():
                function(*arguments)
        except BaseException as error:
            self.error = error
        agent.done = True
        main.release()

    def pause(self, until=None):
        """Let others run; come back when ``until()`` holds."""
        agent = self.local.agent
        agent.blocked = until
        self.local.main.release()
        agent.turn.acquire()
        agent.blocked = None

    def products(self):
        return self.local.agent.products

    def agent(self):
        """Which group of warps runs."""
        return threading.get_ident()

    def fence(self):
        for unfenced in self.stored:
            unfenced.discard(self.agent())


class Barrier:
    def __init__(self):
        self.count = None

    def init(self, count):
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def arrive(self, count):
        self.missing -= count
        assert self.missing >= 0, "more arrivals in a phase than the barrier counts"
        self.check()

    def check(self):
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def complete(self, parity):
        return self.phase & 1 != parity

    def index(self, slot):
        assert slot == 0
        return self


class Barriers:
    def __init__(self, number):
        self.barriers = [Barrier() for _ in range(number)]

    def index(self, slot):
        assert 0 <= slot < len(self.barriers)
        return self.barriers[slot]


class Shared:
    """Shared memory: a view of a tensor. ``unfenced``: the groups of warps that stored to it and made no fence yet."""

    layout = None

    def __init__(self, data, machine, unfenced=None):
        self.data, self.shape, self.dtype, self.machine = data, list(data.shape), data.dtype, machine
        self.unfenced = set() if unfenced is None else unfenced

    def view(self, data):
        return Shared(data, self.machine, self.unfenced)

    def index(self, slot):
        assert 0 <= slot < self.shape[0]
        return self.view(self.data[slot])

    def reshape(self, shape):
        return self.view(self.data.view(shape))

    def permute(self, order):
        return self.view(self.data.permute(order))

    def load(self, layout):
        self.machine.pause()
        return self.data.clone()

    def store(self, value):
        self.machine.pause()
        assert value.dtype == self.dtype, f"{value.dtype} stored to {self.dtype}"
        self.data.copy_(value)
        self.unfenced.add(self.machine.agent())
        self.machine.stored.append(self.unfenced)


class Pointer:
    """Into the memory of a tensor, at elements of ``offset``."""

    def __init__(self, tensor, offset=None):
        self.tensor, self.offset = tensor, tensor.storage_offset() if offset is None else offset

    def __add__(self, offset):
        return Pointer(self.tensor, self.offset + offset)

    def memory(self):
        return self.tensor.untyped_storage().size() // self.tensor.element_size()

    def places(self, mask):
        mask = torch.tensor(True) if mask is None else mask
        assert self.offset.min() >= 0 or not mask.all()
        inside = (self.offset >= 0) & (self.offset < self.memory())
        assert bool((inside | ~mask.expand(self.offset.shape)).all()), "an access outside the tensor's memory"
        flat = self.tensor.as_strided((self.memory(),), (1,), 0)
        return flat, self.offset.long(), mask.expand(self.offset.shape)


class Pending:
    """The result of a wgmma, of no use before the wait."""

    def __init__(self, compute):
        self.compute, self.value = compute, None

    def finish(self):
        self.value = self.compute()


def emulated(machine, program):
    """Stand-ins for the names that the kernels use."""

    def allocate(dtype, shape, layout):
        if dtype is torch.int64:
            return Barrier() if len(shape) == 1 else Barriers(shape[0])
        return Shared(torch.full(shape, float("nan"), dtype=dtype), machine)

    def load(pointer, mask=None, other=None):
        flat, places, mask = pointer.places(mask)
        return torch.where(mask, flat[places.where(mask, 0)], torch.tensor(other, dtype=flat.dtype))

    def store(pointer, value, mask=None):
        flat, places, mask = pointer.places(mask)
        assert value.dtype == flat.dtype, f"{value.dtype} stored to {flat.dtype}"
        flat[places[mask]] = value[mask]

    def extreme(of_scalars, of_tensors):
        def function(a, b):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                return of_tensors(a, b)
            return of_tensors(a, torch.tensor(b)) if isinstance(a, torch.Tensor) else Int(of_scalars(a, b))

        return function

    def where(condition, a, b):
        if isinstance(condition, torch.Tensor):
            return torch.where(condition, a, b)
        return Int(a if condition else b)

    def copy(descriptor, start, barrier, target):
        machine.pause()
        target.data.fill_(float("nan"))
        source = descriptor.base.as_strided(descriptor.shape, descriptor.strides)
        assert target.shape == list(descriptor.block_shape)
        sizes = zip(start, target.shape, source.shape, strict=True)
        slices = [slice(min(first, size), min(first + width, size)) for first, width, size in sizes]

        def land():
            tile = torch.zeros(target.shape, dtype=source.dtype)
            part = source[tuple(slices)]
            tile[tuple(slice(0, n) for n in part.shape)] = part
            target.data.copy_(tile)
            barrier.bytes -= tile.numel() * tile.element_size()
            barrier.check()

        machine.copies.append(land)

    def expect(barrier, size):
        machine.pause()
        barrier.bytes += size
        barrier.arrive(1)

    def arrive(barrier, count):
        machine.pause()
        barrier.arrive(count)
        machine.pause()

    def mma(a, b, acc, use_acc=True, is_async=False):
        assert is_async
        for operand in (a, b):
            assert not getattr(operand, "unfenced", None), "a product reads shared memory stored to without a fence"

        def compute():
            left = a.data if isinstance(a, Shared) else a
            assert left.dtype == b.dtype
            product = left.float() @ b.data.float()
            if not use_acc:
                return product
            # Products end in the order of their start: one that adds to what is under way comes after it.
            return product + (acc.value if isinstance(acc, Pending) else acc)

        machine.products().append(Pending(compute))
        machine.pause()
        return machine.products()[-1]

    def mma_wait(outstanding, deps):
        machine.pause()
        products = machine.products()
        while len(products) > outstanding:
            products.pop(0).finish()
        done = tuple(x.value if isinstance(x, Pending) else x for x in deps)
        assert all(x is not None for x in done), "a product is used that the wait leaves under way"
        return done if len(done) > 1 else done[0]

    return {
        "gl": SimpleNamespace(
            float32=torch.float32, BlockedLayout=lambda *_: None,
            SwizzledSharedLayout=lambda *_: None, NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None),
            int64=torch.int64, constexpr=object, static_range=range,
            NVMMADistributedLayout=lambda **_: None, SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
            convert_layout=lambda x, _: x, allocate_shared_memory=allocate, load=load, store=store, where=where,
            full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
            arange=lambda a, b, _: torch.arange(a, b, dtype=torch.int32), expand_dims=torch.unsqueeze,
            minimum=extreme(min, torch.minimum), maximum=extreme(max, torch.maximum), max=torch.amax, sum=torch.sum,
            exp2=torch.exp2, log2=torch.log2, program_id=lambda axis: Int(program[axis]),
            warp_specialize=lambda functions, warps, registers: machine.run(functions),
        ),
        "tma": SimpleNamespace(async_copy_global_to_shared=copy),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None, init=lambda barrier, count: barrier.init(count), expect=expect, arrive=arrive,
            wait=lambda barrier, parity: machine.pause(lambda: barrier.complete(parity)),
        ),
        "fence_async_shared": machine.fence,
        "warpgroup_mma": mma,
        "warpgroup_mma_wait": mma_wait,
        "range": lambda *bounds: map(Int, range(*map(int, bounds))),
    }  # fmt: skip


CLEAN = SimpleNamespace(n_spills=0, asm={"ptx": ""})  # what a launch gives back: the kernel as it was compiled


class Kernel:
    """Stands where the compiled kernel stood: ``kernel[grid](...)`` runs every program, one after the other.

    A launch gives back ``compiled``.
    """

    def __init__(self, kernel, seed, changed=None, compiled=CLEAN):
        self.kernel, self.seed, self.changed, self.compiled = kernel, seed, changed or {}, compiled

    def __getitem__(self, grid):
        def run(*, num_warps, maxnreg, **arguments):
            given = {name: x if name.isupper() else self.given(x) for name, x in arguments.items()}
            for i, program in enumerate(product(*map(range, (*grid, 1, 1)[:3]))):
                stand_ins = emulated(Machine(self.seed + i), program)
                names = {**vars(builtins), **stand_ins}
                for module in (pipeline, sys.modules[self.kernel.__module__]):
                    for name, value in vars(module).items():
                        if isinstance(value, GluonJITFunction):
                            names[name] = FunctionType(value.fn.__code__, names, name)
                        elif isinstance(value, gl.constexpr):
                            names[name] = value.value
                assert set(self.changed) <= set(names), "no function of the kernels has the name of a changed one"
                names.update({name: FunctionType(f.__code__, names, name) for name, f in self.changed.items()})
                names[self.kernel.__name__](**given)
            return self.compiled

        return run

    @staticmethod
    def given(x):
        """An argument of the launch as the kernel sees it."""
        if isinstance(x, torch.Tensor):
            return Pointer(x)
        if isinstance(x, TensorDescriptor):
            return SimpleNamespace(**vars(x), dtype=x.base.dtype)
        return Int(x) if isinstance(x, int) else x
