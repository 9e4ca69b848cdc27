"""Reading the variables that clusters set: typed, with errors that name them. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rallypoint.errors import ConfigError
from rallypoint.rendezvous.defaults import MASTER_PORT


# 15000 + the last four digits of the job's number: what Slurm users know from other launchers, and
# below the range (32768 and up) from which Linux hands out ports for outgoing connections.
FIRST_DERIVED_PORT = 15000
LOOPBACK = "127.0.0.1"
FLAGS_HINT = "or set --nnodes, --node-rank and --master-addr"


class Text(NamedTuple):
    """A variable that is set."""

    name: str
    text: str


class Number(NamedTuple):
    """A variable that is a whole number."""

    name: str
    value: int


class ClusterVariables:
    """The environment of this process, as a cluster reads it.

    Args:
        env: as it was when ``rally run`` started.
        ancestors: gives the command lines of the processes above this one, the nearest first.

    Attributes:
        env: the same.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        ancestors: Callable[[], Sequence[Sequence[str]]] = tuple,
    ) -> None:
        self.env = env
        self._ancestors = ancestors
        self._found_first: str | None = None  # for the error about what is missing beside it

    def ancestors(self) -> Sequence[Sequence[str]]:
        """The command lines of the processes above this one. Reads ``/proc``.

        Returns:
            The words of each, the nearest process first.
        """
        return self._ancestors()

    def text(self, *names: str) -> Text | None:
        """The first of several variables that is set; an empty one counts as unset.

        Args:
            names: the variables.
        Returns:
            Its name and text, without blanks around it; None if none is set.
        """
        for name in names:
            text = self.env.get(name, "").strip()
            if text:
                self._found_first = self._found_first or name
                return Text(name, text)
        return None

    def number(self, *names: str) -> Number | None:
        """The first of several variables that is set, as a whole number.

        Args:
            names: the variables.
        Returns:
            Its name and value; None if none is set.
        Raises:
            ConfigError: it is not a whole number, 0 or more.
        """
        found = self.text(*names)
        if found is None:
            return None
        # int() would also take '1_0', '+3' and other scripts' digits.
        if not re.fullmatch(r"[0-9]{1,18}", found.text):
            raise ConfigError(found.name, found.text, "expected a whole number, 0 or more")
        return Number(found.name, int(found.text))

    def need(self, *names: str) -> Number:
        """As :meth:`number`, but one of the variables must be set.

        Args:
            names: the variables.
        Returns:
            Its name and value.
        Raises:
            ConfigError: none is set, or it is not a whole number, 0 or more.
        """
        found = self.number(*names)
        if found is None:
            beside = f", although {self._found_first} is" if self._found_first else ""
            raise ConfigError(" or ".join(names), None, f"not set{beside}", FLAGS_HINT)
        return found


def check_below(rank: Number, size: Number, hint: str) -> None:
    if rank.value >= size.value:
        raise ConfigError(
            rank.name, str(rank.value), f"must be below {size.name}, which is {size.value}", hint
        )


def names(*found: Text | Number | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.name for one in found if one is not None))


def own_address(variables: ClusterVariables, num_machines: int) -> Text | None:
    """MASTER_ADDR, if it is set: that is the user's own word, so it beats any host list."""
    found = variables.text("MASTER_ADDR")
    if found is None:
        return None
    host = found.text.strip("[]")
    if not host:
        raise ConfigError(found.name, found.text, "expected a host name or an address")
    loopback = host in {"localhost", "::1"} or re.fullmatch(r"127(\.[0-9]+){3}", host)
    if loopback and num_machines > 1:
        raise ConfigError(
            found.name,
            found.text,
            "means 'this machine' on every machine, and the job has several",
            "unset it, or set it to the host name of node 0",
        )
    return Text(found.name, host)


def own_port(variables: ClusterVariables) -> Number | None:
    found = variables.number("MASTER_PORT")
    # 0 ("any free port") would be a different port in each task.
    if found is not None and not 0 < found.value < 65536:
        raise ConfigError(found.name, str(found.value), "expected a port, 1 to 65535")
    return found


def port_of_step(job: int, step: int) -> int:
    """The job's port for its first step, a different one for each later step: two may run side by side on one machine."""
    return port_from(f"{(job + 1009 * step) % 10000}")


def port_from(run_id: str) -> int:
    """A port all tasks agree on: 15000 + the last four digits of the job's number.

    That is the first number in ``1234[7].server1``, the process id in PMIx's ``prterun-login1-4711@1``, and
    Hydra's port in ``login1:34415``.
    """
    before, at, _ = run_id.rpartition("@")
    if re.fullmatch(r".+:[0-9]+", run_id):
        before, at = run_id, ":"
    numbers = re.findall(r"[0-9]+", before if at else run_id)
    if not numbers:
        return MASTER_PORT
    return FIRST_DERIVED_PORT + int(numbers[-1 if at else 0][-4:])


def port_from_name(name: str) -> int:
    """A port all tasks agree on, from a job's name that contains no number of its own."""
    return FIRST_DERIVED_PORT + zlib.crc32(name.encode("utf-8", "surrogateescape")) % 10000


def hosts_in(found: Text, words: Sequence[str], size: Number) -> list[str]:
    """The hosts that a variable lists, one for each node.

    Args:
        found: the variable.
        words: its text, split.
        size: how many there must be.
    Raises:
        ConfigError: there are more or fewer, or one is not a host name.
    """
    hosts = [word.strip() for word in words]
    if any(not host or re.search(r"\s", host) for host in hosts):
        raise ConfigError(found.name, found.text, "expected a list of hosts")
    if len(hosts) != size.value:
        problem = f"names {len(hosts)} hosts, but {size.name} is {size.value}"
        raise ConfigError(found.name, found.text, problem, FLAGS_HINT)
    return hosts
