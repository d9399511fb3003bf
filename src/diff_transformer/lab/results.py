"""The rows of a comparison, and of any results. The module is light, so that a page is made without PyTorch."""

from pathlib import Path

from diff_transformer.lab.rows import CURVES, ENDING, EXPLORER, RECALL, Rows, files_of, read_file, read_rows

REQUEST = "compare.json"  # of a comparison's folder: seeds and configuration
ABOUT, SPEED = f"comparison{ENDING}", f"throughput{ENDING}"


def read_results(*sources: Path | str) -> Rows:
    """The rows of files and folders of results, those of a comparison as ``read_comparison`` has them.

    Each of several comparisons is a setting, called by its folder, with as much of the path as tells them apart.
    """
    comparisons, others = {}, []
    for source in (Path(source).resolve() for source in sources):
        below = [path.parent for path in sorted(source.rglob(REQUEST))]
        others += [path for path in files_of(source) if not {*below} & {*path.parents}] if below else [source]
        comparisons |= dict.fromkeys(below)
    read = {out / part for out in comparisons for part in ("members", RECALL, ABOUT, SPEED)}
    others = [path for path in others if not read & {path, *path.parents}]
    rows = Rows()
    names, parts = [folder.name for folder in comparisons], 1
    while len({*names}) < len(names):
        parts += 1
        names = [" ".join(folder.parts[-parts:]) for folder in comparisons]
    for folder, name in zip(comparisons, names, strict=True):
        found = read_comparison(folder)
        if len(comparisons) > 1:
            found.frames = {
                table: frame.assign(setting=frame["setting"].where(frame["setting"] == "", name))
                for table, frame in found.frames.items()
            }
        rows = rows.joined(found)
    return read_rows(*others, after=rows) if others else rows


def read_comparison(out: Path) -> Rows:
    """The rows of a comparison; of the small models of recall, what they recall and their attention maps alone."""
    rows = read_rows(*(path for name in ("members", "recall") for path in sorted((out / name).glob(f"*/*{ENDING}"))))
    small = rows.only(setting=RECALL)
    main = rows.only(setting=[name for name in rows.settings if name != RECALL])
    setting = next(iter(main.settings), RECALL)
    small.frames = {
        name: frame.assign(setting=setting)
        for name, frame in small.frames.items()
        if name == EXPLORER or (name.startswith(RECALL) or name not in (*CURVES, "gradients", "model", "about"))
    }
    if len(small[f"{RECALL}_curve"]):  # not that of a main run whose mixture has recall
        main.frames.pop(f"{RECALL}_curve", None)
    more = [path for path in (out / ABOUT, out / SPEED) if path.exists()]
    return main.joined(small).joined(Rows(each for path in more for each in read_file(path)))
