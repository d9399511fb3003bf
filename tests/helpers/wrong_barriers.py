"""Steps of the ring of tiles done wrong, which the emulator must notice. Names stand for the kernels' own."""

from triton.experimental.gluon.language.nvidia.hopper import mbarrier


def always_phase_0(full, c, STAGES):
    mbarrier.wait(full.index(c % STAGES), 0)


def no_wait(full, c, STAGES):
    pass


def claims_without_waiting(full, empty, c, STAGES, BYTES):
    mbarrier.expect(full.index(c % STAGES), BYTES)


def expects_too_few_bytes(full, empty, c, STAGES, BYTES):
    mbarrier.wait(empty.index(c % STAGES), ((c // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(c % STAGES), BYTES - 16)
