"""NumPy's dtypes in a peer's message: made by NumPy's public constructor, whatever the message says.

``numpy.dtype.__setstate__`` trusts its argument, even if flags deny that there are objects, or if fields overlap. An array
of such a dtype takes bytes for pointers. The constructor computes the flags itself, and refuses the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any


_UNITS = frozenset(b"Y M W D h m s ms us ns ps fs as".split())
_ALIGNED = 0x80  # one of a dtype's flags: its fields are aligned like those of a C struct
_ERRORS = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError),
    *(RuntimeError, MemoryError, RecursionError, SyntaxError),
)


class BadDtype(ValueError):
    """There is no such dtype."""


def is_dtype(given: object) -> bool:
    """Whether this is a dtype of NumPy, which may not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(given, numpy.dtype)


def rebuilt(made: Any, state: Any) -> Any:
    """The dtype that a pickle means by ``made.__setstate__(state)``. ``made`` is not changed.

    Args:
        made: a dtype of the same name, without byte order, fields and unit.
        state: version, byte order, (base, shape), names, fields, item size, alignment and flags; in version 4 also the
            metadata, with the unit of times.

    Raises:
        BadDtype: the constructor refuses this dtype, or makes a different one.
    """
    import numpy as np

    try:
        version, order, sub, names, fields, size, _alignment, flags, *more = state
        found = _of_parts(made, sub, names, fields, size, flags)
        metadata, unit = _told_of_times(made, more)
        if unit is not None:
            found = _of_times(made, unit)
        if order in ("<", ">") and sub is None and names is None:
            found = found.newbyteorder(order)
        if metadata:
            found = np.dtype(found, metadata=dict(metadata))
        is_known = version in (3, 4) and order in ("<", ">", "|", "=")
    except _ERRORS as error:
        raise BadDtype(str(error)) from None
    if not is_known or size not in (-1, found.itemsize):
        raise BadDtype(f"version {version!r}, byte order {order!r}, {size!r} bytes of {found}")
    return found


def _of_parts(
    made: Any,
    sub: Any,
    names: Sequence[str] | None,
    fields: Mapping[str, Sequence[Any]],
    size: int,
    flags: int,
) -> Any:
    import numpy as np

    if sub is not None:
        base, shape = sub
        return np.dtype((base, shape))
    if names is None:
        return np.dtype(made)
    told = [fields[name] for name in names]
    about: dict[str, Any] = {
        "names": list(names),
        "formats": [each[0] for each in told],
        "offsets": [each[1] for each in told],
        "itemsize": size,
    }
    if any(len(each) > 2 for each in told):
        about["titles"] = [each[2] if len(each) > 2 else None for each in told]
    found = np.dtype(about, align=bool(flags & _ALIGNED))  # type: ignore[call-overload]
    return np.dtype((np.record, found)) if issubclass(made.type, np.record) else found


def _told_of_times(made: Any, more: Sequence[Any]) -> tuple[Any, Any]:
    """Metadata, and the unit of times, if there is one."""
    if made.kind not in "mM":
        return (more[0] if more else None), None
    if not more:
        return None, None
    metadata, unit = more[0]
    return metadata, unit


def _of_times(made: Any, unit: Sequence[Any]) -> Any:
    import numpy as np

    name, count = bytes(unit[0]), int(unit[1])
    if name == b"generic":
        return np.dtype(f"{made.kind}8")
    if name not in _UNITS:
        raise BadDtype(f"no unit of time {name!r}")
    return np.dtype(f"{made.kind}8[{count}{name.decode()}]")
