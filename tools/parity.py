"""Compare Megatron-Core in every layout with transformers: logits, gradients and the weights' round trip.

    python tools/parity.py --model all --layouts all --json parity.json
    python tools/parity.py --model examples/policies/student --layouts tp1,tp2,pp2 --json parity.json

`--model` is a Hugging Face folder, a tiny random model (qwen3, qwen3_tied, llama, qwen3_moe, glm4_moe) or `all` of
these. One torchrun job a world size; prints the largest difference for each model and layout and exits 1 above the
tolerance.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megathunder.config.learner import LearnerConfig
from megathunder.errors import ConfigError, UserError
from megathunder.metrics.output_file import output_file

# Layout -> (processes, settings of [learner]); those with experts need a mixture of experts.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "tp2_sp": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "pp2_vpp2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "pp3": (3, {"pipeline_parallel": 3}),  # stages of unequal size where 3 does not divide the layers
    "dp2": (2, {}),
    "ep2": (2, {"expert_parallel": 2}),
    "tp2_sp_ep2_etp1": (
        2,
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "expert_tensor_parallel": 1},
    ),
    "cp2": (2, {"context_parallel": 2}),
    "tp4": (4, {"tensor_parallel": 4}),
    "tp2_sp_cp2": (4, {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2}),
    "cp2_pp2": (4, {"context_parallel": 2, "pipeline_parallel": 2}),
    "cp2_ep2": (2, {"context_parallel": 2, "expert_parallel": 2}),
    "tp2_sp_pp2": (4, {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}),
    "pp2_ep2": (4, {"pipeline_parallel": 2, "expert_parallel": 2}),
    "tp2_sp_ep2_etp2": (
        4,
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "expert_tensor_parallel": 2},
    ),
}


def main() -> int:
    arguments = _arguments()
    if arguments.worker:
        return _worker(json.loads(arguments.worker), Path(arguments.json))
    try:
        layouts = _chosen_layouts(arguments.layouts)
        output_file(Path(arguments.json))
        with tempfile.TemporaryDirectory() as scratch:
            models = _models(arguments.model, Path(scratch))
            results = _run(models, layouts, arguments, Path(scratch))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return _report(results, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="all", help="Hugging Face folder, a tiny model's name, or all")
    parser.add_argument("--layouts", default="all", help=f"all, or some of {', '.join(LAYOUTS)}")
    parser.add_argument(
        "--lora-rank", type=int, default=0, help="compare low-rank adapters of this rank on every layer"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest difference that passes")
    parser.add_argument("--json", default="parity.json", help="where the numbers go")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _chosen_layouts(text: str) -> list[str]:
    names = list(LAYOUTS) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in LAYOUTS]
    if unknown:
        raise ConfigError(f"layout {unknown[0]!r}", expected=", ".join(LAYOUTS), remedy="name some of these, or all")
    return names


def _models(text: str, scratch: Path) -> dict[str, str]:
    """Name -> folder; tiny models are made in `scratch`."""
    from examples.policies.build.tiny import TINY, make_tiny

    if (Path(text) / "config.json").is_file():
        return {Path(text).resolve().name: str(Path(text).resolve())}
    return {name: str(make_tiny(name, scratch / name)) for name in (TINY if text == "all" else text.split(","))}


def _run(models: dict[str, str], layouts: list[str], arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Model -> layout -> differences."""
    results: dict[str, Any] = {name: {} for name in models}
    for processes in sorted({LAYOUTS[name][0] for name in layouts}):
        here = [name for name in layouts if LAYOUTS[name][0] == processes]
        out = scratch / f"{processes}.json"
        job = json.dumps(
            {"models": models, "layouts": here, "dtype": arguments.dtype, "lora_rank": arguments.lora_rank}
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command += [__file__, "--worker", job, "--json", str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            ranks = "\n".join(line for line in done.stderr.splitlines() if line.startswith("[rank"))
            raise ConfigError(
                f"the job of {processes} processes ended with {done.returncode}\n{ranks or done.stderr}",
                expected="a comparison",
                remedy="read the error above; run one layout alone with --layouts",
            )
        for name, by_layout in json.loads(out.read_text()).items():
            results[name] |= by_layout
    return results


def _worker(job: dict[str, Any], out: Path) -> int:
    """One rank of a torchrun job."""
    from megathunder.learner.parallel import shutdown

    results = compared(**job)
    if int(os.environ["RANK"]) == 0:
        out.write_text(json.dumps(results))
    shutdown()
    return 0


def compared(models: dict[str, str], layouts: list[str], dtype: str, lora_rank: int) -> dict[str, Any]:
    """Model -> layout -> differences of every model in every layout of this world size; on rank 0 the whole of it."""
    from megatron.core import parallel_state

    from benchmarks.parity.parity_checks import compare
    from megathunder.config.model_shape import read_config_json
    from megathunder.learner.model.build_model import build_model
    from megathunder.learner.parallel import initialize

    results: dict[str, Any] = {name: {} for name in models}
    for layout_name in layouts:
        settings = LAYOUTS[layout_name][1]
        config = LearnerConfig(device="cpu", dtype=dtype, lora_rank=lora_rank, **settings)
        layout = initialize(config)
        for name, folder in models.items():
            has_experts = "moe_intermediate_size" in read_config_json(folder, "learner.model")
            if not has_experts and config.expert_parallel > 1:
                continue
            if has_experts and config.tensor_parallel > 1 and not config.sequence_parallel:
                continue
            try:
                differences = compare(build_model(config, layout, folder=folder))
            except ConfigError as refusal:  # the same on every rank: the layout cannot split this model
                results[name][layout_name] = {"refused": str(refusal)}
                continue
            if differences is not None:
                results[name][layout_name] = dataclasses.asdict(differences)
        parallel_state.destroy_model_parallel()
    return results


def _report(results: dict[str, Any], arguments: argparse.Namespace) -> int:
    print(f"{'model':12} {'layout':18} {'logits':>9} {'gradients':>10}  round trip")
    worst = 0.0
    exact = True
    for model, by_layout in results.items():
        for layout, found in by_layout.items():
            if "refused" in found:
                print(f"{model:12} {layout:18} refused: {found['refused'].splitlines()[0]}")
                continue
            trip = "bit for bit" if found["round_trip"] else "CHANGED"
            print(f"{model:12} {layout:18} {found['logits']:9.1e} {found['gradients']:10.1e}  {trip}")
            worst, exact = max(worst, found["logits"], found["gradients"]), exact and found["round_trip"]
    print(f"largest difference {worst:.1e}, tolerance {arguments.tolerance:.0e}")
    document = {"machine": platform.processor() or platform.machine(), "dtype": arguments.dtype, "models": results}
    Path(arguments.json).write_text(json.dumps(document, indent=2) + "\n")
    return 0 if worst <= arguments.tolerance and exact else 1


if __name__ == "__main__":
    sys.exit(main())
