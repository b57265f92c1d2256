"""Records in files, for plan files and graph files: each record is a row of plain values, constants
are bytes.
"""

from tilewise.ir.file.arrays import array_form, array_named
from tilewise.ir.file.fields import fields_of
from tilewise.ir.file.read_rows import RowReader
from tilewise.ir.file.write_rows import RowWriter, Unwritable

__all__ = [
    "RowReader",
    "RowWriter",
    "Unwritable",
    "array_form",
    "array_named",
    "fields_of",
]
