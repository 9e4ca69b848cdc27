"""What each rank is about to do in a collective, and where that does not match: pure.

A signature is one rank's call: which collective, over a tensor of which shape and type, with which splits. As
a list of numbers its length depends only on the size of the group, so that ranks can exchange it whatever
it says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


# Dimensions that travel; of more only their number does.
_DIMS = 8
_NO_DIM = 2**31
# A text travels as so many numbers of so many bytes, which fit into a signed 64-bit integer.
_WORDS, _BYTES = 5, 7

# Collectives in which ranks may come with different numbers of rows.
ALL_TO_ALL = "all_to_all"
ALL_TO_ALL_DYNAMIC = "all_to_all_dynamic"


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """One rank's call of a collective.

    Args:
        operation: the function's name.
        settings: what else must be equal on all ranks, as text (``sum``).
        dim: the dimension that is gathered or divided; None: there is none.
        divided: whether each rank gets an equal part of ``dim``.
        src: the rank of the group that sends, where only one does.
        dtype: of the tensor, as text.
        device: the type of its device.
        shape: of the tensor.
        needs_grad: whether this rank's backward pass will take part.
        send_splits: rows for each rank of the group; None where there are no splits.
        recv_splits: rows from each rank; None where there are no splits, or they are not known yet.
    """

    operation: str
    settings: str = ""
    dim: int | None = None
    divided: bool = False
    src: int = 0
    dtype: str = ""
    device: str = ""
    shape: tuple[int, ...] = ()
    needs_grad: bool = False
    send_splits: tuple[int, ...] | None = None
    recv_splits: tuple[int, ...] | None = None

    def encode(self, size: int) -> list[int]:
        """As numbers; equally many for each call in a group of ``size`` ranks."""
        dim = _NO_DIM if self.dim is None else self.dim
        found = [int(self.needs_grad), int(self.divided), dim, self.src]
        found += [len(self.shape), *_padded(self.shape, _DIMS)]
        for text in (self.operation, self.settings, self.dtype, self.device):
            found += _text_to_numbers(text)
        for splits in (self.send_splits, self.recv_splits):
            found += [-1 if splits is None else len(splits), *_padded(splits or (), size)]
        return found

    @classmethod
    def decode(cls, numbers: Sequence[int], size: int) -> Signature:
        """What :meth:`encode` made numbers of; a shape or splits that are too long come back cut."""
        rest = list(numbers)

        def take(count: int) -> list[int]:
            taken = rest[:count]
            del rest[:count]
            return taken

        needs_grad, divided, dim, src, num_dims = take(5)
        shape = take(_DIMS)[:num_dims]
        texts = [_numbers_to_text(take(_WORDS)) for _ in range(4)]
        splits: list[tuple[int, ...] | None] = []
        for _ in range(2):
            (length,) = take(1)
            values = take(size)
            # One that is too long is told by its length, not by its values.
            padded = values + [0] * (length - size)
            splits.append(None if length < 0 else tuple(padded[:length]))
        return cls(
            operation=texts[0],
            settings=texts[1],
            dim=None if dim == _NO_DIM else dim,
            divided=bool(divided),
            src=src,
            dtype=texts[2],
            device=texts[3],
            shape=tuple(shape) + (0,) * (num_dims - len(shape)),
            needs_grad=bool(needs_grad),
            send_splits=splits[0],
            recv_splits=splits[1],
        )


def find_problem(signatures: Sequence[Signature], ranks: Sequence[int]) -> str | None:
    """Why these calls, in the order of the group, cannot be one collective; None if they can.

    The same answer on every rank, since it depends on nothing else.

    Args:
        signatures: one for each rank of the group.
        ranks: what the ranks are called.
    """

    def differing(what: str, of: Callable[[Signature], object]) -> str | None:
        found: dict[object, list[int]] = {}
        for rank, signature in zip(ranks, signatures, strict=True):
            found.setdefault(of(signature), []).append(rank)
        if len(found) == 1:
            return None
        parts = [f"{value} on {_named(where)}" for value, where in found.items()]
        return f"{what} is not the same everywhere: {'; '.join(parts)}"

    problem = differing("the collective", lambda s: s.operation)
    if problem:
        return problem
    own = [
        f"rank {rank}: {trouble}"
        for rank, signature in zip(ranks, signatures, strict=True)
        if (trouble := own_problem(signature, len(ranks)))
    ]
    if own:
        return "; ".join(own)
    uneven = {ALL_TO_ALL, ALL_TO_ALL_DYNAMIC}
    with_splits = signatures[0].operation in uneven and any(
        signature.send_splits is not None for signature in signatures
    )
    return (
        differing("the operation", lambda s: s.settings)
        or differing("dim", lambda s: s.dim)
        or differing("src", lambda s: s.src)
        or differing("x's dtype", lambda s: s.dtype)
        or differing("x's device", lambda s: s.device)
        or (differing("x's shape after its rows", lambda s: s.shape[1:]) if with_splits else None)
        or (None if with_splits else differing("x's shape", lambda s: s.shape))
        or differing("whether there are splits", lambda s: _yes(s.send_splits is not None))
        or _mismatch_of_splits(signatures, ranks)
        or differing("whether x needs a gradient", lambda s: _yes(s.needs_grad))
    )


def own_problem(signature: Signature, size: int) -> str | None:
    """What is wrong with one rank's call by itself, in a group of ``size`` ranks."""
    shape, dim = signature.shape, signature.dim
    if dim is not None and not -len(shape) <= dim < len(shape):
        return f"x of shape {list(shape)} has no dimension {dim}"
    if dim is not None and signature.divided and shape[dim] % size:
        return f"dimension {dim} of x is {shape[dim]}, expected a multiple of {size}, the number of ranks"
    if not 0 <= signature.src < size:
        return f"src {signature.src}: expected 0 to {size - 1}, a rank of the group"
    if (signature.operation == ALL_TO_ALL) and (
        (signature.send_splits is None) != (signature.recv_splits is None)
    ):
        return "expected send_splits and recv_splits, or neither; all_to_all_dynamic finds out the second"
    for name, splits in (
        ("send_splits", signature.send_splits),
        ("recv_splits", signature.recv_splits),
    ):
        if splits is None:
            continue
        if len(splits) != size:
            return f"{name} has {len(splits)} entries, expected one for each of {size} ranks"
        if min(splits) < 0:
            return f"{name} {list(splits)}: expected 0 or more each"
    if signature.send_splits is not None and sum(signature.send_splits) != shape[0]:
        sent = sum(signature.send_splits)
        return f"send_splits {list(signature.send_splits)} make {sent} rows, and x has {shape[0]}"
    return None


def _mismatch_of_splits(signatures: Sequence[Signature], ranks: Sequence[int]) -> str | None:
    found = []
    for i, receiver in enumerate(signatures):
        for j, sender in enumerate(signatures):
            if receiver.recv_splits is None or sender.send_splits is None:
                continue
            expected, sent = receiver.recv_splits[j], sender.send_splits[i]
            if expected != sent:
                found.append(
                    f"rank {ranks[j]} sends {sent} rows to rank {ranks[i]}, which expects {expected}"
                )
    return "; ".join(found) or None


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _padded(numbers: Sequence[int], length: int) -> list[int]:
    return [*numbers, *[0] * length][:length]


def _text_to_numbers(text: str) -> list[int]:
    data = text.encode()[: _WORDS * _BYTES].ljust(_WORDS * _BYTES, b"\0")
    return [int.from_bytes(data[i : i + _BYTES]) for i in range(0, len(data), _BYTES)]


def _numbers_to_text(numbers: Sequence[int]) -> str:
    data = b"".join(number.to_bytes(_BYTES) for number in numbers)
    return data.rstrip(b"\0").decode(errors="replace")
