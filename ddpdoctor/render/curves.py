"""Draw curves as text, each with another letter."""

from __future__ import annotations

from collections.abc import Sequence

HEIGHT = 12  # Rows of the picture
SHARED = "*"  # Where curves meet
BAND = ":"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

Values = Sequence[float | None]


def drawn(
    curves: Sequence[tuple[str, Values]], end: str, band: tuple[str, Values, Values] | None = None
) -> list[str]:
    """Return the lines of a picture with a column for each value.

    Args:
        curves: A name and the values of each curve.
        end: What is below the last column.
        band: A name, and the lower and upper edge of an area behind the curves.
    """
    name, low, high = band or ("", (), ())
    known = [
        each
        for values in (*(values for _, values in curves), low, high)
        for each in values
        if each is not None
    ]
    if not known:
        return []
    bottom, top = min(known), max(known)
    width = max(len(values) for _, values in curves)
    cells = [[" "] * width for _ in range(HEIGHT)]

    def row(value: float) -> int:
        return round((top - value) / ((top - bottom) or 1.0) * (HEIGHT - 1))

    for column, (least, most) in enumerate(zip(low, high, strict=True)):
        if least is not None and most is not None:
            for place in range(row(most), row(least) + 1):
                cells[place][column] = BAND
    for letter, (_, values) in zip(_LETTERS, curves, strict=False):
        for column, value in enumerate(values):
            if value is not None:
                cell = cells[row(value)]
                cell[column] = letter if cell[column] in (" ", BAND) else SHARED
    labels = {0: f"{top:.4g}", HEIGHT - 1: f"{bottom:.4g}"}
    lines = [f"{labels.get(at, ''):>9} |{''.join(cell).rstrip()}" for at, cell in enumerate(cells)]
    names = [f"{letter} {text}" for letter, (text, _) in zip(_LETTERS, curves, strict=False)]
    names += [f"{BAND} {name}"] if name else []
    return [*lines, f"{'':>9} +{end:->{width}}", f"{'':>11}{'   '.join(names)}"]
