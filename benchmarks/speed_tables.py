"""Write the tables of README.md and docs/ from the benchmarks' records.

python benchmarks/speed_tables.py            # rewrite the pages
python benchmarks/speed_tables.py --check    # exit 1 if one differs

Times are shares of the matched softmax attention's: lower is faster. A table whose record does not exist stays.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

SIZES = ("batch", "heads", "length", "width")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
KINDS = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
CUDNN = "softmax[cudnn]"
SHOWN = 4096
REMOVED = ("gluon", "one_pass", "one call")  # in the names of forms that were measured and are no longer there
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "figures" / "table7_throughput" / "README.md")


def attention_table(path: Path) -> list[str]:
    """The CPU's: a line for each shape, and the range of the backend ``sdpa`` over all of them."""
    record = json.loads(path.read_text())
    kinds = [(dtype, kind) for dtype in ("float32", "bfloat16") for kind in ("forward", "both")]
    lines = header("batch, h, N, d", *(f"{DTYPES[dtype]} {KINDS[kind]}" for dtype, kind in kinds))
    table: dict[str, dict[tuple, dict]] = {"blockwise": {}, "sdpa": {}}
    for row in record["rows"]:
        if row["backend"] in table and row["gate"] == "passed":
            ratios = table[row["backend"]].setdefault(tuple(row[size] for size in SIZES), {})
            ratios.update({(row["dtype"], kind): row.get(f"{kind}_ratio") for kind in ("forward", "both")})
    for shape, ratios in table["blockwise"].items():
        lines.append(line(", ".join(map(str, shape)), *(number(ratios.get(kind), 2) for kind in kinds)))
    if table["sdpa"]:
        ranges = [span(ratios.get(kind) for ratios in table["sdpa"].values()) for kind in kinds]
        lines.append(line("`sdpa`, all shapes", *ranges))
    return [*lines, "", machine(record)]


CPUS = {"attention_cpu": "AMD Zen 4", "attention_zen5": "AMD Zen 5", "attention_amx": "Intel with AMX",
        "attention_avx2": "AMD without AVX-512"}  # fmt: skip


def speed_table(results: Path) -> list[str]:
    """README's: the operator's time over softmax attention's, and DIFF's training speed over the Transformer's."""

    def rows(name: str) -> list[dict]:
        return json.loads((results / f"{name}.json").read_text())["rows"]

    lines = header("measured", "on", "DIFF / softmax")
    shares = {}
    for name, cpu in CPUS.items():
        ours = [row for row in rows(name) if row["backend"] == "blockwise" and row["gate"] == "passed"]
        shares[cpu] = span(row.get(f"{kind}_ratio") for row in ours for kind in ("forward", "both"))
    operator = "operator, forward, and forward + backward: time over SDPA's with twice the heads (lower is faster)"
    lines.append(line(operator, "2 CPU cores", "; ".join(f"{cpu} {share}" for cpu, share in shares.items())))
    (ours,) = (
        row
        for row in rows("attention_gpu")
        if row["causal"] and (row["backend"], row["length"], row["width"]) == ("triton", 4096, 128)
    )
    cudnn, flash = ours["both_ratio"], ours["ratios"]["softmax[flash]"]["both"]
    times = f"{cudnn:.2f} (cuDNN), {flash:.2f} (FlashAttention-2)"
    lines.append(line("operator, forward + backward: width 128, 4096 tokens, bf16", "NVIDIA H200", times))
    pairs = {"throughput_cpu": "AMD Zen 4, 2 cores", "throughput_gpu": "NVIDIA H200"}
    for name, on in pairs.items():
        for _, diff in pairs_of(rows(name)):
            if name == "throughput_cpu" or diff["length"] == SHOWN:
                size = f"{model(diff)}, batch {diff['batch']}, length {diff['length']}"
                ratio = number(diff["forward_backward_ratio"], 2)
                lines.append(line(f"training, tokens/s (higher is faster): {size}", on, ratio))
    return lines


def attention_gpu_table(path: Path) -> list[str]:
    """A GPU's: ours and the fastest FlashDiffAttn, over softmax attention on cuDNN and FlashAttention-2, with TFLOP/s.

    Causal attention of the length ``SHOWN``.
    """
    record = json.loads(path.read_text())
    shapes: dict[tuple, list[dict]] = {}
    for row in record["rows"]:
        if "both_ms" in row and row["causal"] and row["length"] == SHOWN and is_there(row["backend"]):
            shapes.setdefault((*(row[size] for size in SIZES), row["dtype"]), []).append(row)
    lines = header("batch, h, N, d", "who", *KINDS.values(), "TFLOP/s forward, backward", "of the matrix product")
    for (*sizes, dtype), rows in shapes.items():
        shape = f"{', '.join(map(str, sizes))}, {DTYPES[dtype]}"
        rivals = sorted((r for r in rows if r["role"] == "rival"), key=lambda r: r["both_ms"])
        ours = [r for r in rows if r["backend"] == "triton"]
        baselines = [r for r in rows if r["role"] == "baseline" and r.get("sdpa") in ("cudnn", "flash")]
        chosen = next((r.get("sdpa") for r in baselines if r["backend"] == "softmax"), None)
        for row in [*ours, *rivals[:1], *baselines]:
            by_kernel = [[over(row, kernel, chosen, kind) for kernel in ("cudnn", "flash")] for kind in KINDS]
            ratios = (" / ".join(number(value, 2) for value in pair) for pair in by_kernel)
            rates = f"{row['forward_tflops']:.0f}, {row['backward_tflops']:.0f}"
            shares = f"{percent(row['forward_share'])}, {percent(row['backward_share'])}"
            lines.append(line(shape, who(row), *ratios, rates, shares))
    said = "Each ratio: over softmax attention on cuDNN's kernel / on FlashAttention-2's, both by PyTorch's SDPA."
    return [*lines, "", f"{said} {machine(record)}"]


def is_there(backend: str) -> bool:
    """False for a form that was measured and is no longer there."""
    return not any(name in backend for name in REMOVED)


CACHES = ((1, 4096), (1, 65536), (16, 4096), (64, 4096))  # batch and cache of decoding on a GPU


def decode_table(path: Path) -> list[str]:
    """The operator over a cache, then the models one token at a time."""
    record = json.loads(path.read_text())
    operators = [r for r in record["rows"] if r["kind"] == "operator" and r["role"] == "backend" and "us" in r]
    on_gpu = bool(record["provenance"].get("machine"))
    lines = []
    if operators:
        lines += header("backend", "batch, h / cached heads, N, d", "time", "GB/s", "of a copy's")
    for row in operators:  # some, by our own kernel: the rest stands in the record
        if (row["batch"], row["cache"]) not in CACHES if on_gpu else row["batch"] != 1:
            continue
        if row["backend"] != ("triton" if on_gpu else "blockwise"):
            continue
        sizes = f"{row['batch']}, {row['heads']} / {row['kv_heads']}, {row['cache']}, {row['width']}"
        shape = f"{sizes}, {DTYPES[row['dtype']]}"
        rate, share = f"{row['gb_per_s']:.0f}", percent(row["copy_share"])
        lines.append(line(row["backend"], shape, number(row["ratio"], 2), rate, share))
    for backend in dict.fromkeys(row["backend"] for row in operators if on_gpu):
        ratios = [row["ratio"] for row in operators if row["backend"] == backend]
        lines.append(line(f"`{backend}`, all {len(ratios)}", "", f"{min(ratios):.2f} to {max(ratios):.2f}", "", ""))
    lines += [""] if operators else []
    pairs = pairs_of([r for r in record["rows"] if r["kind"] == "model"])
    if pairs:
        lines += header("model", "batch, cache", "Transformer, tokens/s", "DIFF, tokens/s", "DIFF / Transformer")
    for softmax, diff in pairs:
        rates = (f"{row['tokens_per_second']:,.0f}" for row in (softmax, diff))
        lines.append(line(model(diff), f"{diff['batch']}, {diff['cache']}", *rates, number(diff["ratio"], 2)))
    return [*lines, "", machine(record)]


def throughput_table(path: Path) -> list[str]:
    """Table 7: tokens a second of the pair, and DIFF / Transformer beside the paper's."""
    record = json.loads(path.read_text())
    lines = header(
        "model", "batch x N", "", "Transformer, tokens/s", "DIFF, tokens/s", "DIFF / Transformer", "paper", "MFU"
    )
    for softmax, diff in pairs_of(record["rows"]):
        for kind, name in {"forward_backward": "forward + backward", "prefill": "prefill"}.items():
            rates = (f"{row[f'{kind}_tokens_per_second']:,.0f}" for row in (softmax, diff))
            ratios = number(diff[f"{kind}_ratio"], 3), number(diff.get(f"{kind}_paper_ratio"), 2)
            mfu = f"{percent(softmax[f'{kind}_mfu'])} / {percent(diff[f'{kind}_mfu'])}"
            lines.append(line(model(diff), f"{diff['batch']} x {diff['length']}", name, *rates, *ratios, mfu))
    return [*lines, "", machine(record)]


def pairs_of(rows: list[dict]) -> list[tuple[dict, dict]]:
    """The Transformer's and DIFF's row of each setting; one without its partner is left out."""
    sides = ([row for row in rows if row["side"] == side] for side in ("softmax", "diff"))
    return list(zip(*sides, strict=False))


def over(row: dict, kernel: str, chosen: str | None, kind: str) -> float | None:
    """Time over softmax attention's on a kernel of SDPA; ``chosen``: the one that SDPA chose for it."""
    return row[f"{kind}_ratio"] if kernel == chosen else row["ratios"].get(f"softmax[{kernel}]", {}).get(kind)


def who(row: dict) -> str:
    """A default is named with the kernel that ran."""
    return row["backend"] if "sdpa" not in row or "[" in row["backend"] else f"{row['backend']} ({row['sdpa']})"


def model(row: dict) -> str:
    """Preset, width where it is not the preset's, layers where they are not all, dtype, whether compiled."""
    width = f", d_model {row['fields']['hidden_size']}" if "hidden_size" in row["fields"] else ""
    layers, whole = row["layers"], row["layers_of_preset"]
    cut = "" if layers == whole else f", {layers} of {whole} layers" if layers < whole else f", {layers} layers"
    compiled = ", compiled" if row.get("compiled") else ""
    return f"{row['model']}{width}{cut}, {DTYPES[row['dtype']]}{compiled}"


def machine(record: dict) -> str:
    """What the numbers were measured on."""
    source = record["provenance"]
    gpu = source.get("machine") or {}
    if gpu:
        versions = (
            f"driver {gpu['nvidia_smi'].get('driver_version', 'unknown')}, cuDNN {gpu['cudnn']}, Triton {gpu['triton']}"
        )
        rate = source["ceilings"]["matmul_tflops"].get("bfloat16")
        product = "" if rate is None else f", bf16 matrix product {rate:.0f} TFLOP/s"
        copy = f", copy {source['ceilings']['copy_gb_per_s']:.0f} GB/s"
        return f"{gpu['gpu']}, PyTorch {source['torch']}, {versions}{product}{copy}."
    threads = f"{source['threads']} thread{'s' * (source['threads'] > 1)}"
    return f"{source['cpu']}, {threads}, PyTorch {source['torch']}."


def header(*names: str) -> list[str]:
    return [line(*names), "|" + "---|" * len(names)]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def span(values: Iterable[float | None]) -> str:
    """The smallest and the largest of ``values``."""
    given = [value for value in values if value is not None]
    return f"{min(given):.2f} to {max(given):.2f}" if given else ""


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def compiled_table(path: Path) -> list[str]:
    """What the compiler tells of the GPU kernels: a line for each GPU and the paper's widths."""
    record = json.loads(path.read_text())
    forms = ("forward", "backward")
    lines = header("GPU", "d", *forms, "repeated", "spilled", "least time, ms", "decoding, ms")
    for total in record["sums"]:
        if total["dtype"] != "bfloat16" or (total["width"], total["value_width"]) not in ((64, 128), (128, 256)):
            continue
        same = ("capability", "dtype", "width", "value_width", "language")
        rows = [row for row in record["rows"] if all(row[name] == total[name] for name in same)]
        ours = [total.get(form, {}) for form in forms]
        lines.append(
            line(
                f"sm_{total['capability']}" + (", Hopper kernels" if total["language"] == "gluon" else ""),
                f"{total['width']}",
                *(number(form.get("units"), 1) for form in ours),
                percent(max(row["executed_over_needed"] for row in rows) - 1),
                f"{max(row['spilled_bytes'] for row in rows)} B",
                " + ".join(number(form["roofline_ms"], 2) for form in ours if form),
                number(total.get("decode", {}).get("roofline_ms"), 3),
            )
        )
    batch, heads, length = (record["setting"][name] for name in ("batch", "heads", "length"))
    half, single = ([row for row in record["rows"] if row["dtype"] == dtype] for dtype in ("float16", "float32"))
    repeated = percent(max((row["executed_over_needed"] for row in half), default=1) - 1)
    spilled, most = (max((row["spilled_bytes"] for row in rows), default=0) for rows in (half, single))
    spilling = sum(row["spilled_bytes"] > 0 for row in single)
    setting = f"batch {batch}, {heads} heads and length {length}; of decoding, for one token over such caches"
    said = (
        f"Triton {record['rows'][0]['triton']}, bf16, causal. Times for {setting}. fp16, the same calls: at most "
        f"{repeated} repeated, {spilled} B spilled. fp32 uses no tensor cores; {spilling} of its {len(single)} kernels "
        f"spill, at most {most} B a thread."
    )
    return [*lines, "", said]


def goals(path: Path) -> list[str]:
    from gpu_goals import goals_table

    return goals_table(path.parent)


TABLES = {
    "speed": (speed_table, RESULTS),
    "attention": (attention_table, RESULTS / "attention_cpu.json"),
    "attention_amx": (attention_table, RESULTS / "attention_amx.json"),
    "attention_avx2": (attention_table, RESULTS / "attention_avx2.json"),
    "compiled": (compiled_table, RESULTS / "compiled.json"),
    "attention_gpu": (attention_gpu_table, RESULTS / "attention_gpu.json"),
    "goals_gpu": (goals, RESULTS / "attention_gpu.json"),
    "decode": (decode_table, RESULTS / "decode_cpu.json"),
    "decode_gpu": (decode_table, RESULTS / "decode_gpu.json"),
    "throughput": (throughput_table, RESULTS / "throughput_cpu.json"),
    "throughput_gpu": (throughput_table, RESULTS / "throughput_gpu.json"),
}


def parts(page: Path) -> dict[str, str]:
    """The tables of ``page`` whose record exists."""
    named = re.findall(r"^<!-- (\w+) -->$", page.read_text(), re.M)
    return {name: "\n".join(make(path)) for name, (make, path) in TABLES.items() if name in named and path.exists()}


if __name__ == "__main__":
    from diff_transformer.report.generated import filled, keep

    sys.exit(keep({page: filled(page, parts(page)) for page in PAGES}, check=sys.argv[1:] == ["--check"]))
