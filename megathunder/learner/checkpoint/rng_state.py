"""The random generators of one rank on disk: Python's, NumPy's, torch's and Megatron's tracked ones.

    folder/generators_00003.json      rank 3: names -> states, bytes as base64

Training here draws from none of them unless a layer drops out; saved so that a resumed run may. Called by `state.py`.
A file of another number of ranks is left alone: the generators keep the seed this rank was started with.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy
import torch
from torch import Tensor


class Generators(msgspec.Struct, frozen=True, kw_only=True):
    """States as their libraries give them. `tracked`: Megatron's, by name; torch's are byte tensors."""

    ranks: int
    python: tuple[int, tuple[int, ...], float | None]
    numpy_keys: tuple[int, ...]
    numpy_rest: tuple[int, int, float]
    torch: bytes
    cuda: bytes
    tracked: dict[str, bytes]


def save_generators(folder: Path, rank: int, ranks: int) -> None:
    """Write this rank's generators."""
    kind, keys, *rest = numpy.random.get_state()
    assert kind == "MT19937"
    states = Generators(
        ranks=ranks,
        python=random.getstate(),
        numpy_keys=tuple(keys.tolist()),
        numpy_rest=tuple(rest),
        torch=_bytes(torch.get_rng_state()),
        cuda=_bytes(torch.cuda.get_rng_state()) if torch.cuda.is_available() else b"",
        tracked={name: _bytes(state) for name, state in _tracker().get_states().items() if isinstance(state, Tensor)},
    )
    _file(folder, rank).write_bytes(msgspec.json.encode(states))


def load_generators(folder: Path, rank: int, ranks: int) -> bool:
    """Restore what `save_generators` wrote for this rank; False where another number of ranks wrote."""
    path = _file(folder, rank)
    states = msgspec.json.decode(path.read_bytes(), type=Generators) if path.is_file() else None
    if states is None or states.ranks != ranks:
        return False
    random.setstate(states.python)
    numpy.random.set_state(("MT19937", numpy.array(states.numpy_keys, dtype=numpy.uint32), *states.numpy_rest))
    torch.set_rng_state(_tensor(states.torch))
    if states.cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(states.cuda))
    if states.tracked:
        _tracker().set_states({name: _tensor(state) for name, state in states.tracked.items()})
    return True


def _tracker() -> object:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"generators_{rank:05d}.json"


def _bytes(state: Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
