"""A worker of an rpc group that obeys the test: it reads lines of JSON from one FIFO and answers on another."""

import json
import os
import sys
from pathlib import Path

from rallypoint import rpc
from rallypoint._core import secret
from rallypoint.rpc import PeerLost, RpcTimeout
from rallypoint.wire import tcp


rank = int(os.environ["RANK"])
done: list[int] = []
_connect = tcp.connect


def note(number: int) -> int:
    done.append(number)
    return number


def agent():
    return rpc.api._get_current_rpc_agent()


def facts():
    return {
        "store": [os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])],
        "secret": (secret.held() or b"").hex(),
        "pid": os.getpid(),
    }


def join(options):
    rpc.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.NativeRpcBackendOptions(**options),
    )
    return dict(agent().group.me.addresses)


def call(number):
    try:
        return str(rpc.rpc_sync("w1", note, (number,), timeout=5.0))
    except (PeerLost, RpcTimeout) as error:
        return f"lost: {error}"


def divert(where):
    """Redirect this worker's connections without it noticing, as a router would. None: stop."""
    tcp.connect = _connect if where is None else lambda _, *rest: _connect(tuple(where), *rest)


def lead_astray(where):
    """Put that address into the other worker's record. Returns the true one."""
    addresses = agent().group.find("w1").addresses
    (kind,) = [each for each in addresses if each.startswith("tcp")]
    before, addresses[kind] = addresses[kind], tuple(where)
    return before


def hang_up():
    """Break the connections that this worker has opened."""
    for each in agent().connections.all_outgoing():
        each.line.shut()


def seen():
    return {"done": done, "changed": rpc.statistics()["changed_frames"]}


def main() -> None:
    folder = Path(sys.argv[1])
    with (folder / f"ask-{rank}").open() as orders, (folder / f"say-{rank}").open("w") as answers:
        for line in orders:
            what, *arguments = json.loads(line)
            if what == "leave":
                break
            answers.write(json.dumps(globals()[what](*arguments)) + "\n")
            answers.flush()
    rpc.shutdown()


main()
