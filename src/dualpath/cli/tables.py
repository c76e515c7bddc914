"""What the commands that compute print: the choice of text or JSON, shares and bytes as text."""

TEXT = "text"
JSON = "json"
FORMATS = (TEXT, JSON)


def percent(share: float, digits: int = 1) -> str:
    """Return a signed percentage."""
    return f"{share * 100:+.{digits}f} %"


def gigabytes(amount: float) -> str:
    """Return bytes (or bytes/s) in GB with three significant digits, whole from 100 on."""
    value = amount / 1e9
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
