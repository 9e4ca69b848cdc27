"""A key-value server in the style of Redis: JSON lines over TCP. Prints its port, then serves until it is killed."""

import asyncio
import json
import sys
import time
from typing import Any


class Keys:
    def __init__(self, password: str) -> None:
        self.password = password
        self.values: dict[str, str] = {}
        self.set_at: dict[str, float] = {}
        self.changed = asyncio.Condition()

    async def put(self, key: str, value: str) -> None:
        async with self.changed:
            self.values[key] = value
            self.set_at[key] = time.monotonic()
            self.changed.notify_all()

    async def answer(self, do: str, key: str = "", **more: Any) -> Any:
        match do:
            case "set":
                await self.put(key, more["value"])
            case "get":
                return [self.values.get(each) for each in more["keys"]]
            case "wait":
                async with self.changed:
                    here = self.changed.wait_for(lambda: key in self.values)
                    try:
                        await asyncio.wait_for(here, more["timeout"])
                    except TimeoutError:
                        return None
                return self.values[key]
            case "add":
                total = int(self.values.get(key, "0")) + more["amount"]
                await self.put(key, str(total))
                return total
            case "new":
                if key not in self.values:
                    await self.put(key, more["value"])
                return self.values[key]
            case "delete":
                return self.values.pop(key, None) is not None
            case "clear":
                for each in [each for each in self.values if each.startswith(key)]:
                    del self.values[each]
            case "age":
                return time.monotonic() - self.set_at[key]
        return None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if json.loads(await reader.readline()) != self.password:
                writer.write(b'"wrong password"\n')
                return
            writer.write(b'"welcome"\n')
            while line := await reader.readline():
                writer.write(json.dumps(await self.answer(**json.loads(line))).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


async def main(password: str) -> None:
    server = await asyncio.start_server(Keys(password).serve, "127.0.0.1", 0, limit=1 << 24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
