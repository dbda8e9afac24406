"""Which variants of a test run by default where only a few do."""


def is_one_of(wanted: int, number: int, count: int) -> bool:
    """Whether this one is chosen: so many of them, evenly spread, the first among them."""
    return number * wanted // count != (number - 1) * wanted // count
