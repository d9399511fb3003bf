"""The Hopper kernels' own code, run on the CPU by a small emulator of what they are written in.

Gluon has no interpreter. The emulator runs the Python of the kernels with stand-ins for ``gl``, ``tma``, ``mbarrier``
and the wgmma calls. The three groups of warps are threads of which one runs at a time, chosen by a seeded generator;
TMA copies land at a random later time and the memory they will fill holds NaN until then; a wgmma reads its operands as
late as its wait allows. So a wrong phase, slot or arrival count ends in a deadlock, an error or a wrong number.
"""

import builtins
import random
import sys
import threading
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from diff_transformer.ops.reference import attend
from diff_transformer.testing import assert_within_budget, make_inputs

pytest.importorskip("triton", reason="the kernels are written in Triton's Gluon")
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diff_transformer.ops.triton.gluon import attend_forward, forward, steps, verify
from diff_transformer.ops.triton.gluon.steps import release
from diff_transformer.ops.triton.gluon.verify import expected_results


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


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "xor", "radd", "rsub", "rmul", "neg"):
    if _name != "neg":
        setattr(Int, f"__{_name}__", _integer_operation(f"__{_name}__"))


class Deadlock(Exception):
    """Every group of warps waits and no copy is on its way."""


class Machine:
    """One program's groups of warps, taking turns at random, and the copies that have been started."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.copies, self.agents, self.error = [], [], None
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
    """Shared memory: a view of a tensor."""

    layout = None

    def __init__(self, data):
        self.data, self.shape, self.dtype = data, list(data.shape), data.dtype

    def index(self, slot):
        assert 0 <= slot < self.shape[0]
        return Shared(self.data[slot])

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def permute(self, order):
        return Shared(self.data.permute(order))


class Pointer:
    """Into the memory of a tensor, at elements of ``offset``."""

    def __init__(self, tensor, offset=None):
        self.tensor, self.offset = tensor, tensor.storage_offset() if offset is None else offset

    def __add__(self, offset):
        return Pointer(self.tensor, self.offset + offset)

    def memory(self):
        return self.tensor.untyped_storage().size() // self.tensor.element_size()

    def places(self, mask):
        assert self.offset.min() >= 0 or not mask.all()
        inside = (self.offset >= 0) & (self.offset < self.memory())
        assert bool((inside | ~mask.expand(self.offset.shape)).all()), "an access outside the tensor's memory"
        flat = self.tensor.as_strided((self.memory(),), (1,), 0)
        return flat, self.offset.long(), mask.expand(self.offset.shape)


class Pending:
    """What a wgmma will have written: of no use before the wait."""

    def __init__(self, compute):
        self.compute, self.value = compute, None

    def finish(self):
        self.value = self.compute()


def emulated(machine, program):
    """Stand-ins for the names that the kernels use."""

    def allocate(dtype, shape, layout):
        if dtype is torch.int64:
            return Barrier() if len(shape) == 1 else Barriers(shape[0])
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def load(pointer, mask=None, other=None):
        flat, places, mask = pointer.places(torch.tensor(True) if mask is None else mask)
        return torch.where(mask, flat[places.where(mask, 0)], torch.tensor(other, dtype=flat.dtype))

    def store(pointer, value, mask=None):
        flat, places, mask = pointer.places(torch.tensor(True) if mask is None else mask)
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
        acc = acc.value if isinstance(acc, Pending) else acc

        def compute():
            left = a.data if isinstance(a, Shared) else a
            assert left.dtype == b.dtype
            product = left.float() @ b.data.float()
            return acc + product if use_acc else product

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
            float32=torch.float32, int64=torch.int64, constexpr=object, static_range=range,
            NVMMADistributedLayout=lambda **_: None, SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
            convert_layout=lambda x, _: x, allocate_shared_memory=allocate, load=load, store=store, where=where,
            full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
            arange=lambda a, b, _: torch.arange(a, b, dtype=torch.int32), expand_dims=torch.unsqueeze,
            minimum=extreme(min, torch.minimum), maximum=extreme(max, torch.maximum), max=torch.amax, sum=torch.sum,
            exp2=torch.exp2, log2=torch.log2, program_id=lambda axis: Int(program),
            warp_specialize=lambda functions, warps, registers: machine.run(functions),
        ),
        "tma": SimpleNamespace(async_copy_global_to_shared=copy),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None, init=lambda barrier, count: barrier.init(count), expect=expect, arrive=arrive,
            wait=lambda barrier, parity: machine.pause(lambda: barrier.complete(parity)),
        ),
        "warpgroup_mma": mma,
        "warpgroup_mma_wait": mma_wait,
        "range": lambda *bounds: map(Int, range(*map(int, bounds))),
    }  # fmt: skip


class Kernel:
    """Stands where the compiled kernel stood: ``kernel[grid](...)`` runs every program, one after the other."""

    def __init__(self, kernel, seed, changed=None):
        self.kernel, self.seed, self.changed = kernel, seed, changed or {}

    def __getitem__(self, grid):
        def run(*arguments, num_warps, maxnreg, **constants):
            given = [self.given(x) for x in arguments]
            for program in range(grid[0]):
                stand_ins = emulated(Machine(self.seed + program), program)
                names = {**vars(builtins), **stand_ins}
                for name, value in [*vars(steps).items(), *vars(sys.modules[self.kernel.__module__]).items()]:
                    if isinstance(value, GluonJITFunction):
                        names[name] = FunctionType(value.fn.__code__, names, name)
                names.update({name: FunctionType(f.__code__, names, name) for name, f in self.changed.items()})
                names[self.kernel.__name__](*given, **constants)

        return run

    @staticmethod
    def given(x):
        """An argument of the launch as the kernel sees it."""
        if isinstance(x, torch.Tensor):
            return Pointer(x)
        if isinstance(x, TensorDescriptor):
            return SimpleNamespace(**vars(x), dtype=x.base.dtype)
        return Int(x) if isinstance(x, int) else x


CONFIGURATIONS = dict(forward.CONFIGURATIONS)


def emulate(monkeypatch, seed=0, changed=None):
    """Make the launcher run the emulator."""
    monkeypatch.setattr(
        forward,
        "CONFIGURATIONS",
        {width: replace(c, kernel=Kernel(c.kernel, seed, changed)) for width, c in CONFIGURATIONS.items()},
    )


def check(inputs, is_causal, need_gradient=True, scale=None):
    """Run the emulated kernel through its launcher and compare everything that it returns."""
    scale = inputs.q1.shape[-1] ** -0.5 if scale is None else scale
    B, H, T = inputs.q1.shape[:3]
    inputs = inputs._replace(lam=inputs.lam.expand(B, H, T, 1))
    k2 = None if inputs.k2 is inputs.k1 else inputs.k2
    q1, q2, k1, _, v, lam = inputs
    results = attend_forward(q1, q2, k1, k2, v, lam, is_causal, None, scale, need_gradient)
    expected = expected_results(*inputs, is_causal=is_causal, scale=scale)
    reference = attend(*(x.double() for x in inputs), None, is_causal, None, scale)
    torch.testing.assert_close(expected["out"][0], reference, rtol=0, atol=1e-12)
    for (name, (exact, eager)), result in zip(expected.items(), results, strict=True):
        if name != "out" and not need_gradient:
            assert result.numel() == 0
            continue
        assert torch.equal(result.isinf(), exact.isinf()), name
        result, exact = (x.masked_fill(x.isinf(), 0) for x in (result, exact))
        assert_within_budget(result, exact, eager, what=name)
    assert results[0].transpose(1, 2).is_contiguous()


CAUSAL, FULL = True, False
# name: (arguments of make_inputs, causal)
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "one program, exact tiles": ({"T": 128}, CAUSAL),
    "odd length": ({"T": 333}, CAUSAL),
    "one query, one key": ({"T": 1}, CAUSAL),
    "one query": ({"T": 1, "S": 333}, CAUSAL),
    "one key": ({"T": 130, "S": 1}, FULL),
    "65 rows": ({"T": 65, "S": 65}, FULL),
    "fewer queries than keys": ({"T": 63, "S": 250}, CAUSAL),
    "the first query sees two tiles but for a key": ({"T": 63, "S": 189}, CAUSAL),
    "the first query sees two tiles": ({"T": 63, "S": 190}, CAUSAL),
    "queries that see nothing": ({"T": 200, "S": 63}, CAUSAL),
    "whole programs that see nothing": ({"T": 300, "S": 20}, CAUSAL),
    "full, odd": ({"T": 111, "S": 333}, FULL),
    "full, whole tiles": ({"T": 128, "S": 256}, FULL),
    "full, more tiles than slots": ({"T": 20, "S": 1000}, FULL),
    "rows for one half only": ({"T": 40, "S": 700}, CAUSAL),
    "full, rows for one half only": ({"T": 40, "S": 200}, FULL),
    "heads and batches": ({"B": 2, "H": 3, "T": 150}, CAUSAL),
    "grouped keys": ({"B": 2, "H": 4, "G": 2, "T": 70}, CAUSAL),
    "shared noise, grouped keys": ({"B": 2, "H": 4, "Hn": 2, "G": 1, "T": 70}, CAUSAL),
    "as a layer lays them out": ({"B": 2, "H": 2, "T": 111, "strided": True}, CAUSAL),
    "one lam": ({"H": 2, "T": 70, "lam_shape": (1, 1, 1, 1)}, CAUSAL),
    "lam a head": ({"B": 2, "H": 2, "T": 70, "lam_shape": (1, 2, 1, 1)}, CAUSAL),
    "float16": ({"T": 150, "dtype": torch.float16}, CAUSAL),
}


def inputs_of(case, D):
    arguments: dict[str, Any] = {"B": 1, "H": 1, "dtype": torch.bfloat16, "requires_grad": False, **CASES[case][0]}
    return make_inputs(D=D, **arguments)


def causal_results(inputs):
    return attend_forward(*inputs, True, None, 0.1, True)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_results_are_within_the_budget(monkeypatch, case, D):
    emulate(monkeypatch)
    check(inputs_of(case, D), CASES[case][1])


@pytest.mark.parametrize("D", [64, 128])
def test_without_gradients_only_the_output_is_written(monkeypatch, D):
    emulate(monkeypatch)
    check(inputs_of("heads and batches", D), CAUSAL, need_gradient=False)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale(monkeypatch, D, scale):
    emulate(monkeypatch)
    check(inputs_of("fewer queries than keys", D), CAUSAL, scale=scale)


@pytest.mark.parametrize("D", [64, 128])
def test_one_key_for_both_maps(monkeypatch, D):
    emulate(monkeypatch)
    inputs = inputs_of("odd length", D)
    check(inputs._replace(k2=inputs.k1), CAUSAL)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("seed", range(100, 500, 100))
def test_the_order_of_events_does_not_matter(monkeypatch, D, seed):
    inputs = inputs_of("odd length", D)
    emulate(monkeypatch, seed=0)
    first = causal_results(inputs)
    emulate(monkeypatch, seed=seed)
    for one, other in zip(first, causal_results(inputs), strict=True):
        assert torch.equal(one, other)


def always_phase_0(full, c, STAGES):
    mbarrier.wait(full.index(c % STAGES), 0)


def no_wait(full, c, STAGES):
    pass


def waits_for_the_phase_after(full, empty, c, STAGES, BYTES):
    mbarrier.wait(empty.index(c % STAGES), (c // STAGES) & 1)
    mbarrier.expect(full.index(c % STAGES), BYTES)


def claims_without_waiting(full, empty, c, STAGES, BYTES):
    mbarrier.expect(full.index(c % STAGES), BYTES)


def expects_too_few_bytes(full, empty, c, STAGES, BYTES):
    mbarrier.wait(empty.index(c % STAGES), ((c // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(c % STAGES), BYTES - 16)


def never_releases(empty, c, STAGES):
    pass


def releases_the_next_slot(empty, c, STAGES):
    mbarrier.arrive(empty.index((c + 1) % STAGES), count=1)


def skips_without_waiting(full, empty, first, end, STAGES):
    for c in range(first, end):
        release(empty, c, STAGES)


def skips_nothing(full, empty, first, end, STAGES):
    pass


WRONG = {
    "wait_full": [always_phase_0, no_wait],
    "claim": [waits_for_the_phase_after, claims_without_waiting, expects_too_few_bytes],
    "release": [never_releases, releases_the_next_slot],
    "skip": [skips_without_waiting, skips_nothing],
}


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("name", "wrong"), [(name, f) for name, wrong in WRONG.items() for f in wrong])
def test_a_wrong_barrier_is_noticed(monkeypatch, D, name, wrong):
    """Of ten orders of events at least one must end in a deadlock, a refused arrival or a wrong number."""
    inputs = inputs_of("rows for one half only", D)
    emulate(monkeypatch)
    right = causal_results(inputs)[0]
    noticed = 0
    for seed in range(10):
        emulate(monkeypatch, seed=1000 * seed, changed={name: wrong})
        try:
            noticed += not torch.equal(causal_results(inputs)[0], right)
        except (Deadlock, AssertionError):
            noticed += 1
    assert noticed


def forgets_to_divide(acc, m, l, lse, rows, T, OL, SAVE):
    if SAVE:
        gl.store(lse + rows, m + gl.log2(l), mask=rows < T)
    return acc


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("changed", [None, {"finish": forgets_to_divide}])
def test_the_gate_lets_right_kernels_pass_and_no_others(monkeypatch, caplog, D, changed):
    emulate(monkeypatch, changed=changed)
    monkeypatch.setattr(verify, "PROBLEMS", ({"T": 70, "S": 63},))
    monkeypatch.setattr(verify, "wait", lambda device: None)
    monkeypatch.setattr(verify, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with caplog.at_level("INFO", logger="diff_transformer"):
        verdicts = [verify.verified(torch.device("cpu", 0), D, torch.bfloat16, CAUSAL) for _ in "12"]
    assert verdicts == [changed is None] * 2
    assert len(caplog.records) == 1
    assert ("agrees with the reference" if changed is None else "is not used") in caplog.text


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(verify, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not verify.verified(torch.device("cuda", 0), 64, torch.bfloat16, CAUSAL)
    assert verify._verdicts == {}
