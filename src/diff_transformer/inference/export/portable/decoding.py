"""An exported model decodes through ``diff_attention``: it has no native call for a whole layer."""

FEW = 0  # queries up to which the native call would be tried


def decoding_head(core) -> None:
    """No core can decode in one native call."""
