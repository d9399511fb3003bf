"""Tables of paired differences, in Markdown."""

from diff_transformer.study.analysis import Row


def table(title: str, rows: list[Row]) -> str:
    lines = [
        f"**{title}** ({rows[0].seeds} pair{'s' * (rows[0].seeds > 1)})",
        "",
        "| | Transformer | DIFF | difference | claim |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(f"| {row.measure} | {row.baseline:.3f} | {row.side:.3f} | {interval(row)} | {row.verdict} |")
    return "\n".join(lines)


def interval(row: Row) -> str:
    mean, low, high, _ = row.difference
    return f"{mean:+.3f}" if low is None else f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def in_short(rows: list[Row]) -> str:
    """Which of the claims held, in a sentence; empty where no row has a claim."""
    said = {
        name: [row.measure for row in rows if row.verdict == name] for name in ("held", "did not hold", "undecided")
    }
    words = {"held": "Better in DIFF", "did not hold": "Worse in DIFF", "undecided": "Undecided"}
    return " ".join(f"{words[name]}: {'; '.join(names)}." for name, names in said.items() if names)
