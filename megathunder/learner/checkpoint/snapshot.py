"""One checkpoint of this rank on its way to disk: planned and finished by all ranks together, written by each alone.

    plan     what this rank writes                                        collective
    copy     that, to host memory, so that the next update may change it  `start`; left out by `write`
    write    files, flushed to disk                                       any thread, no collective
    finish   Megatron's metadata, by rank 0                               collective

Megatron's own writer starts processes: seconds each, and a signal to this process group would kill them in the middle.
Called by `state.py`. At most one at a time: Megatron's results pass through one queue of the process.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megathunder.learner.checkpoint import checkpoint_status
from megathunder.process_exit import RESUME_HINT, describe_os_error, system_error


class Snapshot:
    """Of `state`, Megatron's sharded state of the whole job; every rank makes one at the same time."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._folder = folder
        filesystem_async._results_queue = queue.SimpleQueue()
        self._request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
        self._buckets: list[Any] = []
        if self._request.async_fn is not None:  # this rank has something to write
            self._buckets = self._request.preload_fn() if self._request.preload_fn else self._request.async_fn_args[1]
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        """Write from a copy in host memory, in a thread; `checkpoint_status.read_all` says when that has ended."""
        held = self._request.async_fn_args[1] if self._buckets else []
        self._buckets = [_copied(bucket, live) for bucket, live in zip(self._buckets, held, strict=True)]
        checkpoint_status.reserve(self._folder, dist.get_rank())
        # A rank that ends early takes it along: what it leaves is no checkpoint.
        self._thread = threading.Thread(target=self._write_and_tell, name="checkpoint", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write this rank's files. Raises what the file system does."""
        if self._request.async_fn is None:
            return
        (transforms, *_), done = self._request.async_fn.args, {}
        results = self._request.async_fn_args[2]
        for index, bucket in enumerate(self._buckets):
            answer, count = queue.SimpleQueue(), queue.Queue()
            count.put(index)
            FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, answer, count, use_fsync=True)
            _, outcome = answer.get()
            if isinstance(outcome, Exception):
                raise outcome
            done[index] = outcome
        results.put(done)
        self._buckets = []

    def finish(self) -> None:
        """Once every rank has written; raises what went wrong in this rank's thread."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        dist.barrier()
        for finalize in self._request.finalize_fns:
            finalize()

    def _write_and_tell(self) -> None:
        try:
            self.write()
        except Exception as error:  # the edge of the thread: told to the coordinator, raised by `finish`
            self._error = error
        checkpoint_status.write(self._folder, dist.get_rank(), self._said())

    def _said(self) -> str:
        if self._error is None:
            return ""
        refused = system_error(self._error)
        return describe_os_error(refused, self._folder, RESUME_HINT) if refused else repr(self._error)


def _copied(bucket: Any, live: Any) -> Any:
    """A bucket of Megatron's with tensors of its own: those of a GPU have been copied, a CPU's are the live ones."""
    file, key, (texts, tensors) = bucket
    pairs = zip(tensors, live[2][1], strict=True)
    return file, key, (texts, [(item, mine.clone() if mine is own else mine) for (item, mine), (_, own) in pairs])
