"""Byte counts in binary units."""

import pytest

from tilewise.core.sizes import format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (3 << 19, "1.50 MiB"),
        (223957144320, "208.58 GiB"),
        (1 << 41, "2.00 TiB"),
    ],
)
def test_sizes_use_the_largest_unit(num_bytes, text):
    """Two decimals from KiB on; bytes below."""
    assert format_bytes(num_bytes) == text
