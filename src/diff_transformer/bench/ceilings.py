"""What this device reaches at best, measured: a large matrix product and a large copy, both on random data."""

import torch

from diff_transformer.bench.timing import interleaved_times

MATRIX = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 2**32, "cpu": 2**27}


def ceilings(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    *,
    repeats: int = 10,
    size: int | None = None,
    copied: int | None = None,
) -> dict:
    """{"matmul_tflops": {dtype: TFLOP/s}, "copy_gb_per_s": bytes read and written, and the sizes of both}.

    ``size``: rows and columns of the matrices. ``copied``: bytes copied. Medians of ``repeats``.
    """
    kind = torch.device(device).type
    size, copied = size or MATRIX.get(kind, 1024), copied or COPY_BYTES.get(kind, 2**27)
    rates = {}
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        times = interleaved_times({"matmul": lambda a=a, b=b, out=out: torch.mm(a, b, out=out)}, repeats, device)
        rates[str(dtype).removeprefix("torch.")] = round(2 * size**3 / times["matmul"].median / 1e12, 6)
    source = torch.randint(-128, 127, (copied,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = interleaved_times({"copy": lambda: target.copy_(source)}, repeats, device)["copy"]
    return {
        "matmul_tflops": rates,
        "matmul_size": size,
        "copy_gb_per_s": round(2 * copied / copy.median / 1e9, 2),
        "copy_bytes": copied,
    }
