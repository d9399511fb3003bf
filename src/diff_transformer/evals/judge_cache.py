"""Replies that were paid for, on disk."""

import json
import os
from pathlib import Path


class ReplyCache:
    """Replies by key, in a file of JSON lines that only grows; a line that was cut off is passed over."""

    def __init__(self, path: Path | None):
        self.path, self.replies = path, {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").split("\n"):
                try:
                    entry = json.loads(line)
                    self.replies[entry["key"]] = entry["reply"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    continue

    def add(self, key: str, reply: str, **details: object) -> None:
        self.replies[key] = reply
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": key, "reply": reply, **details}) + "\n"
        with self.path.open("a+b") as file:  # one write, so that two runs may share the file
            torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            file.write((b"\n" if torn else b"") + line.encode())
            file.flush()
            os.fsync(file.fileno())
