"""The check that everything with a size needs."""


def require_positive(**sizes: float | None) -> None:
    """Raise ValueError for the first of ``sizes`` that is given and not positive, with its name and value."""
    for name, value in sizes.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be positive")
