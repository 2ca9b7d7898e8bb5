"""`python -m tests.support.forked ROUNDS WORDS...`: the command line in several processes, as torchrun starts them.

The processes are forked, since each import of torch takes seconds. ROUNDS are `COUNT` or `COUNT:STEP`, with commas: the
last of COUNT processes is killed before that step, and the next round starts. The state is saved after every step.
Tests call `forked` and `process_group`, which leave no process behind.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


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
        for process in started:  # torchrun gives each process a group of its own
            with suppress(psutil.NoSuchProcess):
                process.kill()
        run.communicate()


def torchrun(count: int, *words: str) -> tuple[str, ...]:
    """What `process_group` starts for `torchrun --nproc-per-node COUNT WORDS...`."""
    return "-m", "torch.distributed.run", "--nproc-per-node", str(count), *words


def forked(rounds: str, *words: str, timeout: float = 600.0) -> str:
    """What the rounds said; they end as expected within `timeout` seconds."""
    with process_group("-m", "tests.support.forked", rounds, *words) as run:
        said = run.communicate(timeout=timeout)[1]
    assert run.returncode == 0, said
    return said


def run_process(rank: int, count: int, port: int, restarts: int, last_step: int | None, words: list[str]) -> None:
    from sportsllm import cli, processes
    from sportsllm.training import loop

    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    known |= {"TORCHELASTIC_RESTART_COUNT": restarts, "TORCHELASTIC_RUN_ID": os.getppid(), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in known.items()} if count > 1 else {}
    loop._SAVE_EVERY_S = 0.0
    take_step = loop._Run.take_step

    def killed(self: loop._Run, *others: object) -> tuple[float, float, float]:
        if self.state.step == last_step and processes.rank() == count - 1:
            os.kill(os.getpid(), 9)
        return take_step(self, *others)  # type: ignore[arg-type]

    loop._Run.take_step = killed  # type: ignore[method-assign,assignment]
    try:
        cli.main(words if count > 1 or not restarts else [*words, "--resume"])
    except SystemExit as stop:
        sys.stderr.flush()
        os._exit(int(stop.code or 0))  # clearing away what was imported takes longer than the training


def main() -> None:
    import torch
    import torch._dynamo  # what the processes import, imported once
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    import sportsllm.models.training_memory
    import sportsllm.text.tokenizer_training
    import sportsllm.training.cost
    import sportsllm.training.loop
    import sportsllm.verbs.train  # noqa: F401

    torch.set_num_threads(1)
    for restarts, part in enumerate(sys.argv[1].split(",")):
        count, _, step = part.partition(":")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(int(count)):
            if os.fork() == 0:
                run_process(rank, int(count), port, restarts, int(step) if step else None, sys.argv[2:])
        codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(int(count))]
        if bool(step) != any(codes):
            sys.exit(f"round {part}: exit codes {codes}")


if __name__ == "__main__":
    main()
