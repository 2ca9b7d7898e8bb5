"""Loads `serve` with clients, then with malformed requests: python -m tests.sportsllm.serving.load [SECONDS]

Fifty clients ask for two minutes, with prompts of all lengths; a third of the requests is abandoned midway. All greedy
texts must be those of the same requests alone, and nothing may fail but what the documentation states. Meanwhile some
clients never read their streams, and the export's directory vanishes. Then come 10,000 malformed requests.
"""

import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

import sportsllm
from tests.support.models import STORIES

CLIENTS, NEVER_READ, MALFORMED = 50, 3, 10_000
TEXT = "the match began late and rain fell on both sides before a goal was scored by Tom in the last minute"
PATHS = ("/v1/completions", "/v1/chat/completions", "/completion", "/tokenize", "/detokenize", "/apply-template")
Body = dict[str, Any]


def requests(count: int = 40) -> list[Body]:
    """Ragged prompts and lengths, some as chats."""
    generator, made = random.Random(0), list[Body]()
    for number in range(count):
        text = " ".join(generator.choices(TEXT.split(), k=generator.choice((1, 5, 20, 60))))
        body: Body = {"max_tokens": generator.choice((1, 8, 32, 96)), "temperature": 0, "cache_prompt": False}
        chat = {"messages": [{"role": "user", "content": text}]}
        made.append(body | (chat if number % 4 == 0 else {"prompt": text}))
    return made


async def ask(client: httpx.AsyncClient, body: Body, leave_after: int | None = None) -> tuple[int, str]:
    """Status and text, or an empty one if the client leaves after so many events."""
    path, text = f"/v1/{'chat/completions' if 'messages' in body else 'completions'}", ""
    async with client.stream("POST", path, json=body | {"stream": True}) as reply:
        if reply.status_code != 200:
            return reply.status_code, ""
        async for line in reply.aiter_lines():
            if leave_after is not None and (leave_after := leave_after - 1) < 0:
                return 200, ""
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return 200, text


async def never_read(address: tuple[str, int]) -> asyncio.StreamWriter:
    """A stream that is asked for and not read."""
    body = json.dumps({"prompt": "Once", "max_tokens": 400, "temperature": 0, "stream": True, "logprobs": 20})
    _, writer = await asyncio.open_connection(*address, limit=1)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    return writer


async def load(client: httpx.AsyncClient, process: psutil.Process, seconds: float, export: Path) -> list[str]:
    """Fifty clients; returns what is wrong."""
    bodies, found, wrong, memory = requests(), Counter[str](), list[str](), list[tuple[float, int]]()
    alone = [(await ask(client, body))[1] for body in bodies]
    silent = [await never_read((client.base_url.host, client.base_url.port or 80)) for _ in range(NEVER_READ)]
    began = time.monotonic()

    async def one(number: int) -> None:
        generator = random.Random(number)
        while time.monotonic() - began < seconds:
            which = generator.randrange(len(bodies))
            leave = generator.randrange(1, 12) if generator.random() < 1 / 3 else None
            status, text = await ask(client, bodies[which], leave)
            found["left" if leave is not None and status == 200 else str(status)] += 1
            if status == 429:
                await asyncio.sleep(generator.random())
            elif status != 200 or (leave is None and text != alone[which]):
                wrong.append(f"request {which}: {status}, {text!r} instead of {alone[which]!r}")

    async def watch() -> None:
        while time.monotonic() - began < seconds:
            memory.append((time.monotonic() - began, process.memory_info().rss))
            await asyncio.sleep(0.5)
            if export.exists() and time.monotonic() - began > seconds / 2:
                shutil.rmtree(export)

    await asyncio.gather(watch(), *(one(number) for number in range(CLIENTS)))
    for writer in silent:
        writer.close()
    at_s, size = np.array(memory[len(memory) // 2 :]).T
    slope_mb = float(np.polyfit(at_s / 60, size / 1e6, 1)[0])
    print(f"{CLIENTS} clients, {seconds:.0f} s: {dict(sorted(found.items()))}, {len(wrong)} wrong")
    first_mb, last_mb = memory[0][1] / 1e6, size[-1] / 1e6
    print(f"memory {first_mb:.1f} MB at first, {last_mb:.1f} at last; {slope_mb:+.2f} MB a minute in the second half")
    return wrong


def malformed(generator: random.Random) -> bytes:
    """A request's body with something wrong, or random bytes."""
    body: Body = {"prompt": "Once", "messages": [{"role": "user", "content": "Hi"}], "content": "a", "tokens": [3]}
    body |= {"max_tokens": 1, "n": 1, "stop": ["x"], "temperature": 0.5, "logit_bias": {"3": 1}, "seed": 1}
    values = [None, True, -1, 1e308, 10**30, "", "x" * 999, [], [[]], {}, {"a": []}, "\ud800", [None], float("nan")]
    for name in generator.sample(sorted(body), generator.randrange(1, 5)):
        body[name] = generator.choice(values)
    text = json.dumps(body).encode()
    kind = generator.randrange(4)
    if kind == 0:
        return text[: generator.randrange(len(text))]
    if kind == 1:
        return generator.randbytes(generator.randrange(200))
    if kind == 2:
        at = generator.randrange(len(text))
        return text[:at] + generator.randbytes(3) + text[at + 3 :]
    return text


async def send_malformed(client: httpx.AsyncClient) -> list[str]:
    """Malformed requests; returns what is wrong."""
    generator, found, wrong, gate = random.Random(1), Counter[int](), list[str](), asyncio.Semaphore(16)

    async def one() -> None:
        path, body = generator.choice(PATHS), malformed(generator)
        async with gate:
            status = (await client.post(path, content=body)).status_code
        found[status] += 1
        if status >= 500:
            wrong.append(f"{path} {body!r}: {status}")

    await asyncio.gather(*(one() for _ in range(MALFORMED)))
    print(f"{MALFORMED:,} malformed requests: {dict(sorted(found.items()))}")
    return wrong


async def check(url: str, process: psutil.Process, seconds: float, export: Path) -> list[str]:
    """Both, and that the server still answers as at first."""
    limits = httpx.Limits(max_connections=CLIENTS + 20)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        before = await ask(client, requests()[1])
        wrong = await load(client, process, seconds, export) + await send_malformed(client)
        after = await ask(client, requests()[1])
    return wrong + ([] if before == after else [f"afterwards {after} instead of {before}"])


def main(seconds: str = "120") -> int:
    """Start the server on a small INT4 export, and check it."""
    with tempfile.TemporaryDirectory() as scratch:
        export = Path(scratch) / "model"
        sportsllm.quantize(STORIES, out=Path(scratch) / "int4", bits=4, method="rtn")
        sportsllm.export(Path(scratch) / "int4", out=export, threads=1)
        command = [sys.executable, "-m", "sportsllm.cli", "serve", str(export), "--port", "0", "--threads", "1"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            url = next(line for line in server.stderr if line.startswith("serving")).split()[3].rstrip(";")
            while httpx.get(f"{url}/health").status_code != 200:
                time.sleep(0.1)
            wrong = asyncio.run(check(url, psutil.Process(server.pid), float(seconds), export))
            server.terminate()
            print("server:", server.stderr.read() or "nothing", sep="\n")
    print(*wrong[:20], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
