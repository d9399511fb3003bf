"""Documents, and their division into a training and a validation side."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Document:
    """A named text."""

    name: str
    text: str
    group: str = ""  # of documents that quote each other, and are on one side of the split

    @property
    def num_bytes(self) -> int:
        """Length of the text in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents to validate on."""

    train: list[Document]
    validation: list[Document]


def stable_order(documents: Iterable[Document]) -> list[Document]:
    """The documents in the order of a hash of their names, which is the same on every machine."""
    return sorted(documents, key=lambda document: (hash_of_name(document.name), document.name))


def held_out_groups(groups: Iterable[str], share: float = VALIDATION_SHARE) -> set[str]:
    """The groups of the validation side, by a hash: about ``share`` of them, and at least one on each side.

    A group stays on its side when others are added, unless a side was empty. There are two groups or more.
    """
    ordered = sorted(set(groups), key=hash_of_name)
    held_out = {group for group in ordered if hash_of_name(group) < share} or {ordered[0]}
    return held_out - {ordered[-1]}


def take_bytes(documents: Sequence[Document], max_bytes: int) -> list[Document]:
    """Whole documents in their order up to ``max_bytes`` of UTF-8; the last is cut at a line end if it does not fit."""
    taken: list[Document] = []
    room = max_bytes
    for document in documents:
        if document.num_bytes > room:
            head = document.text.encode()[:room].decode(errors="ignore")
            head = head[: head.rfind("\n", len(head) // 2) + 1] or head
            if head.strip() or not taken:
                taken.append(Document(document.name, head, document.group))
            break
        taken.append(document)
        room -= document.num_bytes
    return taken


def hash_of_name(name: str) -> float:
    """A number in [0, 1), a hash of the name."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
