"""What a user may choose about a conversion."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """naive_grouped_query: the authors' layout is that of ``multihead_diffattn.py`` (see ``naive_groups``)."""

    naive_grouped_query: bool = False
