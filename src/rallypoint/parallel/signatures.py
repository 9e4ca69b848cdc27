"""What each rank is about to do in a collective, and where the ranks' calls do not match. Pure.

A signature describes one rank's call: the collective, the tensor's shape and dtype, the splits. It is encoded as a list of
numbers whose length depends only on the size of the group, so ranks can exchange it whatever they are about to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


# How many dimensions are encoded; for the dimensions beyond them, only the total number is.
_DIMS = 8
_NO_DIM = 2**31
# A string is encoded as this many numbers of this many bytes; 7 bytes fit into a signed 64-bit integer.
_WORDS, _BYTES = 5, 7

# Collectives in which ranks may have different numbers of rows.
ALL_TO_ALL = "all_to_all"
ALL_TO_ALL_DYNAMIC = "all_to_all_dynamic"


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """One rank's call of a collective.

    Args:
        operation: the function's name.
        settings: any other text that must be equal on all ranks (``sum``).
        dim: the dimension to gather or divide. None: the collective has none.
        divided: whether each rank gets an equal part of ``dim``.
        src: the sender's rank in the group, for collectives with one sender.
        dtype: the tensor's dtype, as text.
        device: the type of the tensor's device.
        shape: the tensor's shape.
        needs_grad: whether this rank's backward pass takes part.
        send_splits: rows to each rank of the group. None: no splits.
        recv_splits: rows from each rank. None: no splits, or not known yet.
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
        """Encode as numbers, the same count for every call in a group of ``size`` ranks."""
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
        """Reverse :meth:`encode`. Dimensions and splits beyond the limit come back as zeros."""
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
            # Of splits that are too long, only the length is encoded.
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
    """Why these calls do not form one collective; None if they do.

    Returns the same text on every rank, since it depends only on the arguments.

    Args:
        signatures: one for each rank, in group-rank order.
        ranks: the global ranks, for the message.
    """

    def differing(what: str, of: Callable[[Signature], object]) -> str | None:
        found: dict[object, list[int]] = {}
        for rank, signature in zip(ranks, signatures, strict=True):
            found.setdefault(of(signature), []).append(rank)
        if len(found) == 1:
            return None
        parts = [f"{value} on {_named(where)}" for value, where in found.items()]
        return f"{what} differs between ranks: {'; '.join(parts)}"

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
    """What is wrong with one rank's call on its own, in a group of ``size`` ranks; None if nothing is."""
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
        return "expected send_splits and recv_splits, or neither; all_to_all_dynamic needs send_splits only"
    for name, splits in (
        ("send_splits", signature.send_splits),
        ("recv_splits", signature.recv_splits),
    ):
        if splits is None:
            continue
        if len(splits) != size:
            return f"{name} has {len(splits)} entries, expected one for each of {size} ranks"
        if min(splits) < 0:
            return f"{name} {list(splits)}: expected numbers of 0 or more"
    if signature.send_splits is not None and sum(signature.send_splits) != shape[0]:
        sent = sum(signature.send_splits)
        return (
            f"send_splits {list(signature.send_splits)} add up to {sent} rows, but x has {shape[0]}"
        )
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
