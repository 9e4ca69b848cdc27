"""Functions that are pickled by value keep the names of their files, so that tracebacks show where they failed.

cloudpickle writes the same name for all, so that equal functions have equal pickles.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any


_NAME_OF_ALL = "<dynamic-code>"

# From a type to what reduces its objects.
Table = Mapping[type, Callable[[Any], Any]]


def keeping(table: Table) -> Table:
    """cloudpickle's ``dispatch_table``, except that code keeps the name of its file."""
    reduce = table[CodeType]

    def reduce_code(code: CodeType) -> Any:
        make, arguments, *more = reduce(code)
        kept = tuple(code.co_filename if each == _NAME_OF_ALL else each for each in arguments)
        return (make, kept, *more)

    return ChainMap({CodeType: reduce_code}, table)  # type: ignore[arg-type]  # only read
