"""torchrun, with two differences: a job that is told to stop, and has saved, ends with status 0; no traceback of
torchrun's own follows what the ranks have said.

    python tools/torchrun.py --nproc-per-node N tools/train.py --config C.toml ...        every option is torchrun's

torchrun itself ends with 1 whenever it gets a signal, however its ranks ended. Here it gets no SIGTERM: rank 0 does,
saves a checkpoint and takes the other ranks along, torchrun sees every rank end with 0, and so does this. On a machine
without rank 0 the first SIGTERM waits for rank 0's machine to get one too. The second one ends the job at once, as
SIGINT (Ctrl-C) does. The status is torchrun's, 128 + n where signal n ended it.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this checkout

from megathunder.processes import die_with_parent

HANDLED = "SIGINT,SIGHUP,SIGQUIT"  # by torchrun: its own list without SIGTERM
AGENT = "--run-agent"  # this file's first word where it is torchrun itself


def main(argv: list[str]) -> int:
    """Run torchrun with `argv` and watch over it."""
    torchrun = subprocess.Popen(
        [sys.executable, __file__, AGENT, "--signals-to-handle", HANDLED, *argv],
        start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
        preexec_fn=_before_torchrun,
    )
    told = False

    def stop(number: int, _: object) -> None:
        nonlocal told
        ranks = _ranks(torchrun.pid)
        if number == signal.SIGTERM and not told and ranks:
            told = True
            for process in ranks.get("0", []):
                process.send_signal(number)
        else:
            torchrun.send_signal(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    status = torchrun.wait()
    return status if status >= 0 else 128 - status


def run_agent(argv: list[str]) -> int:
    """torchrun in this process. What it raises says where in torch the end was noticed; the reason is in its summary of
    the ranks, which is printed."""
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

        try:
            torchrun(argv)
        except SignalException as ended:
            return 128 + ended.sigval
        except ChildFailedError as failed:
            print(failed, file=sys.stderr)
            return 1
    except KeyboardInterrupt:  # before torchrun had handlers
        return 128 + signal.SIGINT
    finally:  # torchrun's handlers raise, wherever this process is while it ends
        for name in HANDLED.split(","):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    return 0


def _ranks(agent: int) -> dict[str, list[psutil.Process]]:
    """Rank -> its process, of those that torchrun has started on this machine; one that has ended, which torchrun is
    about to notice, stands for no process."""
    found: dict[str, list[psutil.Process]] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(agent).children():
            try:
                found.setdefault(child.environ().get("RANK", ""), []).append(child)
            except psutil.ZombieProcess:
                found.setdefault("", [])
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
    return found


def _before_torchrun() -> None:
    """A SIGTERM to everything at once must not reach it either; it ends its ranks when this process is killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(signal.SIGINT)


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(run_agent(words[1:]) if words[:1] == [AGENT] else main(words))
