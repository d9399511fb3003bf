"""Reads a compiled kernel's assembly: the products of its loops and its arrivals at barriers that no warp waited for
(PTX), and spilled registers in its loops (SASS, as nvdisasm writes it)."""

import re

# A label, and a branch or the end. In SASS the condition of a branch may be an operand as well.
PTX = (r"\s*(\$L__BB\w+):", r"\s*(?P<condition>@\S+\s+)?(?:bra\S*\s+(?P<target>\$L__BB\w+)|ret);")
SASS = (
    r"\s*(\.L_x_\w+):",
    r"\s*/\*\w+\*/\s+(?P<condition>@\S+\s+|(?=BRA\S*\s+[^`]+,))?(?:BRA\S*\s.*`\((?P<target>\.L_x_\w+)\)|EXIT)",
)


def products_of_loops(ptx: str, num_warps: int) -> tuple[int, ...]:
    """Multiply-adds of the tensor cores in one turn of each innermost loop that has any, over all warps of a program.

    They include what several warps compute alike because a tile is too small to be shared by all of them. What the
    compiler peeled off a loop does not count.
    """
    lines = ptx.splitlines()
    products = [_products(line, lines[:i], num_warps) for i, line in enumerate(lines)]
    return tuple(sum(products[i] for i in loop) for loop in _loops(lines, PTX, products))


def spills_in_loops(sass: str) -> int:
    """Loads and stores of spilled registers in the innermost loops that multiply: by tensor cores, if there are such
    loops, otherwise by FFMA.

    Outside of these, a spilled register costs a few cycles of a program: it is written before a loop and read after it.
    """
    lines = sass.splitlines()
    for multiply in (r"\s[A-Z]*MMA\b", r"\sFFMA\b"):
        if loops := _loops(lines, SASS, [int(bool(re.search(multiply, line))) for line in lines]):
            return sum(bool(re.search(r"\s(LDL|STL)\b", lines[i])) for i in set().union(*loops))
    return 0


def _loops(lines: list[str], syntax: tuple[str, str], products: list[int]) -> list[set[int]]:
    """Line numbers of each innermost loop that has products; ``products``: how many a line has."""
    blocks, following = _basic_blocks(lines, *syntax)
    counts = [sum(products[i] for i in block) for block in blocks]
    live = {0} | _reachable(0, set(range(len(blocks))), following)
    following = [after if block in live else [] for block, after in enumerate(following)]
    return [{i for block in loop for i in blocks[block]} for loop in _innermost(live, following, counts)]


def _basic_blocks(lines: list[str], label: str, branch: str) -> tuple[list[list[int]], list[list[int]]]:
    """Line numbers of each basic block, and the blocks that may follow it."""
    blocks: list[list[int]] = [[]]
    labels: dict[str, int] = {}
    ends: dict[int, tuple[str | None, bool]] = {}  # target of the branch at a block's end; whether it always branches
    for i, line in enumerate(lines):
        if found := re.match(label, line):
            blocks.append([])
            labels[found[1]] = len(blocks) - 1
        blocks[-1].append(i)
        if found := re.match(branch, line):
            ends[len(blocks) - 1] = found["target"], found["condition"] is None
            blocks.append([])
    following: list[list[int]] = []
    for block in range(len(blocks)):
        target, always = ends.get(block, (None, False))
        following.append(
            ([] if always or block + 1 == len(blocks) else [block + 1]) + ([labels[target]] if target else [])
        )
    return blocks, following


def _innermost(among: set[int], following: list[list[int]], counts: list[int]) -> list[set[int]]:
    """The blocks of each innermost loop that lies ``among`` these blocks and whose ``counts`` are not all zero."""
    reach = {block: _reachable(block, among, following) for block in among}
    found, done = [], set()
    for block in sorted(among):
        if block in done or block not in reach[block]:
            continue
        loop = {other for other in reach[block] if block in reach[other]}
        done |= loop
        entries = {
            other for other in loop if any(other in following[i] for i in range(len(following)) if i not in loop)
        }
        inner = _innermost(loop - (entries or {min(loop)}), following, counts)
        found += inner or [loop] * any(counts[i] for i in loop)
    return found


def _reachable(start: int, among: set[int], following: list[list[int]]) -> set[int]:
    """The blocks that can be reached from ``start`` in one step or more without leaving ``among``."""
    seen: set[int] = set()
    open_ = [start]
    while open_:
        for block in following[open_.pop()]:
            if block in among and block not in seen:
                seen.add(block)
                open_.append(block)
    return seen


def _products(line: str, before: list[str], num_warps: int) -> int:
    """Multiply-adds of one line of PTX, over all warps that execute it."""
    found = re.search(r"\b(wgmma\.mma_async|mma\.sync)\S*\.m(\d+)n(\d+)k(\d+)", line)
    if found:
        times = num_warps // 4 if found[1] == "wgmma.mma_async" else num_warps
        return times * int(found[2]) * int(found[3]) * int(found[4])
    found = re.search(r"\btcgen05\.mma\.\S*kind::f16\s+(.*);", line)
    if not found:
        return 0
    register = found[1].split(",")[3].strip()  # the instruction descriptor (PTX ISA, 5th generation tensor cores)
    value = next(said[1] for text in reversed(before) if (said := re.search(rf"mov\.\w+\s+{register}, (\d+)", text)))
    columns, rows = int(value) >> 17 & 0x3F, int(value) >> 24 & 0x1F
    return 16 * rows * 8 * columns * 16  # one thread issues it for the whole program


def unguarded_arrivals(ptx: str) -> int:
    """Number of arrivals at an mbarrier while other warps may still access shared memory.

    One thread of a warpgroup arrives for all. That is safe if the warps met at a barrier after their last access.
    """
    found, guarded = 0, True
    for line in ptx.splitlines():
        if re.search(r"\bbar(rier)?\.(cta\.|warp\.)?sync\b", line):
            guarded = True
        elif re.search(r"\b(ld|st)\.shared|\b(ld|st)matrix", line):
            guarded = False
        elif "mbarrier.arrive." in line and "expect_tx" not in line:
            found += not guarded
    return found
