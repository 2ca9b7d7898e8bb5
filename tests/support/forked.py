"""The command line in processes of their own that start at once: forks of one that has imported torch and the packages.

Each of those imports takes seconds. `python -m tests.support.forked` is that process; it ends with the test run that
started it. Tests call `program`, `forked` and `process_group`, which leave no process behind.
"""

import gc
import importlib
import itertools
import json
import math
import os
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

import benchmarks
import compress
import export
import sportsllm

CLIENT = """#!{python} -SE
# Has its arguments run by the process that listens at the socket, with this one's folder, environment, parent and
# streams. SIGTERM reaches that process too. `program` -P -m sportsllm.cli is what --nproc starts.
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as listening:
    listening.connect({path!r})
    signal.signal(signal.SIGTERM, lambda *_: listening.send(b"T"))
    words = sys.argv[4:] if sys.argv[1:4] == ["-P", "-m", "sportsllm.cli"] else sys.argv[1:]
    asked = {{"words": words, "folder": os.getcwd(), "environment": dict(os.environ), "rounds": {rounds!r}}}
    asked |= {{"program": os.path.abspath(sys.argv[0]), "parent": os.getppid()}}
    socket.send_fds(listening, [json.dumps(asked).encode() + b"\\n"], [0, 1, 2])
    code = listening.recv(8)
sys.exit(int(code) if code else 137)
"""


@contextmanager
def process_group(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start `python WORDS...`; at the end of the block kill it and every process that it started."""
    run = subprocess.Popen(
        [sys.executable, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield run
    finally:
        started = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        kill_all(started)
        run.communicate()


def kill_all(processes: list[psutil.Process]) -> None:
    """End them one by one: torchrun gives each process a group of its own."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@cache
def _started() -> tuple[Path, Any]:
    """The socket of the process that forks, and the pipe whose end is its own."""
    path = Path(tempfile.mkdtemp()) / "socket"
    words = [sys.executable, "-m", "tests.support.forked", str(path)]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    return path, server.stdin


def program(file: Path, rounds: str = "") -> Path:
    """Write a program that does what `sportsllm-compress` or `python -c` does, or `forked` with these rounds."""
    file.write_text(CLIENT.format(python=sys.executable, path=str(_started()[0]), rounds=rounds), encoding="utf-8")
    file.chmod(0o755)
    return file


def forked(rounds: str, *words: str, timeout: float = 600.0) -> str:
    """The command line in several processes, as torchrun starts them; returns what they said.

    Args:
        rounds: `COUNT` or `COUNT:STEP`, with commas: after that step the state is saved, the last of COUNT processes is
            killed, and the next round starts. `COUNT@RANK:CALL` kills the process RANK instead, at the CALL-th of its
            calls that meet other processes, take a step or save, and saves after every step.
        words: of the command line; `{rank}` stands for the number of the process.
        timeout: in seconds, within which the rounds end as expected.
    """
    with tempfile.TemporaryDirectory() as folder:
        client = str(program(Path(folder) / "client", rounds))
        with process_group(client, *words) as run:
            said = run.communicate(timeout=timeout)[1]
    assert run.returncode == 0, said
    return said


def run_process(
    rank: int, count: int, port: int, restarts: int, last: int, dies: bool, calls: bool, words: list[str]
) -> int:
    from sportsllm import processes
    from sportsllm.training import loop, state

    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    known |= {"TORCHELASTIC_RESTART_COUNT": restarts, "TORCHELASTIC_RUN_ID": os.getppid(), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in known.items()} if count > 1 else {}
    loop._SAVE_EVERY_S = 0.0 if calls else math.inf
    counted = itertools.count(1)

    def kill_in(module: Any, name: str) -> None:
        function = getattr(module, name)

        def killed(*given: Any, **named: Any) -> Any:
            place = next(counted) if calls else given[0].state.step
            if dies and place == last:
                os.kill(os.getpid(), 9)
            if not calls:
                loop._SAVE_EVERY_S = 0.0 if place + 1 == last else math.inf
            return function(*given, **named)

        setattr(module, name, killed)

    kill_in(loop._Run, "take_step")
    for module, name in (
        (processes, "wait"),
        (processes, "add_up"),
        (state, "write_tensors"),
        (state, "replace_state"),
    ):
        if calls:
            kill_in(module, name)
    words = [word.replace("{rank}", str(rank)) for word in words]
    return run_command(words if count > 1 or not restarts else [*words, "--resume"])


def run_command(words: list[str]) -> int:
    from sportsllm import cli

    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
        return 0
    try:
        cli.main(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    raise AssertionError("main ends the process")


def run_rounds(rounds: str, words: list[str]) -> int:
    for restarts, part in enumerate(rounds.split(",")):
        processes, _, number = part.partition(":")
        count, calls, killed = processes.partition("@")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(int(count)):
            dies = bool(number) and rank == int(killed or int(count) - 1)
            in_fork(run_process, rank, int(count), port, restarts, int(number or 0), dies, bool(calls), words)
        codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(int(count))]
        if not (-signal.SIGKILL in codes if number else not any(codes)):
            sys.stderr.write(f"round {part}: exit codes {codes}\n")
            return 1
    return 0


def in_fork(work: Callable[..., int], *arguments: Any) -> None:
    """Do the work in a fork, which ends with the code that is returned."""
    if os.fork() == 0:
        code = 1
        try:
            code = work(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # clearing away what was imported takes longer than the training


def obey(client: socket.socket) -> None:
    """Pass the client's signals on; without it nothing is left to do."""
    while client.recv(1):
        os.kill(os.getpid(), signal.SIGTERM)
    kill_all(psutil.Process().children(recursive=True))
    os.killpg(0, signal.SIGKILL)


def answer(connection: socket.socket) -> int:
    """Do what a client asks for, and end when it does."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, *_ = socket.recv_fds(connection, 2**20, 3)
    while not message.endswith(b"\n"):
        message += connection.recv(2**20)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    asked = json.loads(message)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    Thread(target=obey, args=[connection], daemon=True).start()
    if asked["rounds"]:
        code = run_rounds(asked["rounds"], asked["words"])
    else:
        os.getppid = lambda: asked["parent"]
        if "--nproc" in asked["words"]:
            sys.executable = asked["program"]
        code = run_command(asked["words"])
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(str(code).encode())
    return code


def main() -> None:
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    for package in (sportsllm, compress, export, benchmarks):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with suppress(ImportError):  # of an optional package, or a library of kernels
                importlib.import_module(module.name)
    torch.set_num_threads(1)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
    path = Path(sys.argv[1])
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:  # which ends with the test run
            connection, _ = listening.accept()
            in_fork(answer, connection)
            connection.close()
    shutil.rmtree(path.parent)


if __name__ == "__main__":
    main()
