"""The verb `serve`: exports behind OpenAI's API, with a page to try them. Needs no torch."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, current_thread, main_thread
from typing import TYPE_CHECKING, Annotated, cast

import typer

from sportsllm import options
from sportsllm.commands import find_gguf, load_function
from sportsllm.errors import ArtifactError, ResourceError, UsageError
from sportsllm.files import require_directory
from sportsllm.results import Result

if TYPE_CHECKING:
    from sportsllm.inference.decoder import Decoder
    from sportsllm.serving.engine import Slots

WAITING = 16
"""Sequences that may wait for each that runs, so that none waits for minutes."""


@dataclass(frozen=True, kw_only=True)
class ServeResult(Result):
    """A server that has ended.

    Attributes:
        url: address of the server.
        models: names of the models.
        sequences, tokens: number of generated sequences and tokens.
    """

    url: str
    models: list[str]
    sequences: int
    tokens: int


def serve(
    directories: Annotated[list[Path], typer.Argument(metavar="EXPORT...", help="Exports.", show_default=False)],
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 is any free one.")] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SPORTSLLM_API_KEY", help="Secret that requests must carry.", show_default="none"),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin of web pages that may call the server (CORS); may be repeated.",
            show_default="none",
        ),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, max=64, help="Requests that run at once, per model.")] = 4,
    context: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens of a request.", show_default="the model's context")
    ] = None,
    cache_mb: Annotated[int, typer.Option(min=0, help="Memory for shared prompt prefixes, per model.")] = 128,
    draft: options.Draft = None,
    kernels: options.Kernels = "auto",
    threads: options.Threads = None,
) -> ServeResult:
    """Serve exports through OpenAI's API, with a web page to try them."""
    from sportsllm.formats.manifest import plain_name
    from sportsllm.inference.decoder import is_onnx_directory, open_draft

    with suppress(RuntimeError):  # none runs
        asyncio.get_running_loop()
        raise UsageError("serve blocks, but this thread has an event loop, as in a notebook; call it in another thread")
    names = [plain_name(path) for path in directories]
    if len(set(names)) < len(names):
        raise UsageError(f"two exports are named {max(names, key=names.count)}; rename a directory")
    if api_key == "":
        raise UsageError("--api-key is empty; give a secret")
    for path in directories:
        require_directory(path, "an export")
        if not is_onnx_directory(path):
            kind = "a GGUF file, which llama.cpp's server serves" if find_gguf(path) else "not an export"
            raise ArtifactError(f"{path}: {kind}; make one of a checkpoint with `export`")
    import uvicorn

    from sportsllm.console import log
    from sportsllm.serving.access import IDLE_S, Access, TimedProtocol
    from sportsllm.serving.app import Server
    from sportsllm.serving.engine import Engine
    from sportsllm.serving.models import ServedModel

    slot_decoder, turn = load_function("export.runtime.slots", "SlotDecoder"), Lock()

    def engine(path: Path) -> Engine:
        slots = cast("Slots", slot_decoder(path, parallel, context, threads, kernels))
        small = None if draft is None else open_draft(draft, path, cast("Decoder", slots), threads, kernels)
        return Engine(slots, cache_mb * 1_000_000, WAITING * parallel, turn, small)

    models = [ServedModel(name, path, partial(engine, path)) for name, path in zip(names, directories, strict=True)]
    listening = _listen(host, port)
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{reached}]' if ':' in reached else reached}:{listening.getsockname()[1]}"
    app = Server(models, Access(host, api_key, tuple(allow_origin or ()))).app()
    quiet = {"log_level": "warning", "access_log": False, "server_header": False, "lifespan": "off", "ws": "none"}
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every client that leaves a stream
    limits = {"timeout_graceful_shutdown": 3, "timeout_keep_alive": IDLE_S}
    server = uvicorn.Server(uvicorn.Config(app, http=TimedProtocol, **limits, **quiet))
    main, before = current_thread() is main_thread(), signal.getsignal(signal.SIGTERM)
    if main:  # uvicorn raises the signal again when it has stopped
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    try:
        for model in models:
            model.start(partial(setattr, server, "should_exit", True))
        log(f"serving {', '.join(names)} at {url}; press Ctrl-C to stop")
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # how servers end
        pass
    finally:
        for model in models:
            model.stop()
        if main:
            signal.signal(signal.SIGTERM, before)
    for model in models:
        if model.problem is not None:
            raise model.problem
    counts = [model.engine.counts for model in models if model.ready]
    sequences, tokens = (sum(count[name] for count in counts) for name in ("finished", "generated_tokens"))
    return ServeResult(url=url, models=names, sequences=sequences, tokens=tokens)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ResourceError: the port is in use or may not be used.
        UsageError: no such address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # before it is said that the server is there
    except socket.gaierror:
        raise UsageError(f"--host {host}: no such address; give one of this machine") from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--host {host}: not an address of this machine; give 127.0.0.1 or 0.0.0.0") from None
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise ResourceError(f"--port {port} {reason}; give another") from None
    return listening
