"""Labelled texts for many-shot classification (section 3.5): public sets from the disk or the hub, and one from Python
itself."""

import os
from pathlib import Path

from diff_transformer.data.labelled.types import Labelled, LabelledSet, hold_out

__all__ = ["Labelled", "LabelledSet", "load_labelled"]

ACCEPTED = (
    '"python"; "hub:trec", "hub:trec-fine", "hub:banking77", "hub:clinic150"; a file (.label, .csv, .jsonl, or '
    "Clinic-150's .json); or a folder with a file for training and one for testing"
)
_SUFFIXES = (".label", ".csv", ".jsonl", ".json")


def load_labelled(source: str | os.PathLike = "python", *, fine: bool = False) -> LabelledSet:
    """The labelled set named by ``source``.

    Args:
        source: ``"python"`` (offline: ``python_labels``), ``"hub:NAME"`` (of ``hub.SETS``), or a path. Of a folder, the
            file whose name holds "train" is shown and the other one of its kind asked ("test" where there are more); of
            a single file, a fifth is asked, by a hash of the text.
        fine: the 50 classes of TREC instead of its 6.

    Raises:
        FileNotFoundError: for a path that is not there.
        ValueError: for a set that cannot be had or read, or ``fine`` for a set with one kind of classes.
    """
    name = str(source)
    if name.startswith("hub:"):
        from diff_transformer.data.labelled.hub import load_hub_labelled

        wanted = name.removeprefix("hub:")
        _refuse_fine(fine and wanted not in ("trec", "trec-fine"), name)
        return load_hub_labelled("trec-fine" if fine else wanted)
    if name == "python":
        from diff_transformer.data.labelled.python_labels import python_labels

        _refuse_fine(fine, name)
        return python_labels()
    path = Path(name).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"no labelled set at {name}; give {ACCEPTED}")
    train, test = _sides(path) if path.is_dir() else (path, None)
    kind = train.suffix.lower()
    if kind not in _SUFFIXES:
        raise ValueError(f"{train} has suffix {kind!r}, which is not read; give {ACCEPTED}")
    _refuse_fine(fine and kind != ".label", name)
    return _from_files(path, train, test, kind, fine)


def _from_files(path: Path, train: Path, test: Path | None, kind: str, fine: bool) -> LabelledSet:
    from diff_transformer.data.labelled.tables import read_clinic, read_csv, read_json_lines
    from diff_transformer.data.labelled.trec import read_label_file

    if kind == ".json":
        shown, asked = read_clinic(train)
        return LabelledSet(path.name, tuple(shown), tuple(asked), "Query", "Intent")

    def read(file: Path) -> list[Labelled]:
        if kind == ".label":
            return read_label_file(file, fine=fine)
        return read_csv(file) if kind == ".csv" else read_json_lines(file)

    sides = hold_out(read(train)) if test is None else (tuple(read(train)), tuple(read(test)))
    names = {".label": ("Question", "Type"), ".csv": ("Query", "Intent"), ".jsonl": ("Text", "Label")}[kind]
    return LabelledSet(path.name + ("-fine" if fine else ""), *sides, *names)


def _sides(folder: Path) -> tuple[Path, Path | None]:
    """The file to show and the one to ask; for Clinic-150, which holds both in one file, the one and None."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    for suffix in _SUFFIXES[:3]:
        mine = [file for file in files if file.suffix.lower() == suffix]
        train = [file for file in mine if "train" in file.name.lower()]
        others = [file for file in mine if file not in train]
        tests = [file for file in others if "test" in file.name.lower()] or others
        if len(train) == 1 and len(tests) == 1:
            return train[0], tests[0]
    whole = [file for file in files if file.name in ("data_full.json", "data_small.json", "data_oos_plus.json")]
    if whole:
        return whole[0], None
    found = ", ".join(file.name for file in files[:8]) or "nothing"
    raise ValueError(
        f"{folder} holds {found}; give a folder with one training and one test file, or one of: {ACCEPTED}"
    )


def _refuse_fine(refused: bool, name: str) -> None:
    if refused:
        raise ValueError(f"fine classes were asked for, which {name} does not have; only TREC has coarse and fine ones")
