"""Convert a model between a Hugging Face folder and Megatron rank files, either way, bit for bit.

    python tools/convert.py to-megatron --source MODEL --target OUT --tensor 2 --pipeline 2 --expert 1
    python tools/convert.py to-hf --source OUT --target MODEL2

Tensors are read one at a time and memory holds one output file at most. A Megatron folder holds one
`pp{i}_tp{j}_ep{k}.safetensors` a rank (the state dict of its GPTModel), layout.json, config.json and the tokenizer.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megathunder.errors import ConfigError, UserError


def main() -> int:
    arguments = _arguments()
    started = time.monotonic()
    try:
        _refuse_filled(arguments.target, arguments.overwrite)
        count = _convert(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{count} tensors to {arguments.target} in {time.monotonic() - started:.1f} s, peak memory {peak:.0f} MB")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    megatron = commands.add_parser("to-megatron", help="Hugging Face folder -> Megatron rank files")
    megatron.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    megatron.add_argument("--pipeline", type=int, default=1, help="pipeline-parallel size")
    megatron.add_argument("--expert", type=int, default=1, help="expert-parallel size")
    hf = commands.add_parser("to-hf", help="Megatron rank files -> Hugging Face folder")
    hf.add_argument("--file-gb", type=float, default=5.0, help="largest safetensors file, in GB")
    for command in (megatron, hf):
        command.add_argument("--source", type=Path, required=True, help="folder to read")
        command.add_argument("--target", type=Path, required=True, help="folder to write")
        command.add_argument("--overwrite", action="store_true", help="write into a folder that holds weights")
    return parser.parse_args()


def _refuse_filled(target: Path, overwrite: bool) -> None:
    if not overwrite and any(target.glob("*.safetensors")):
        raise ConfigError(
            f"{target} already holds weights", expected="a new folder", remedy="choose another --target or --overwrite"
        )


def _convert(arguments: argparse.Namespace) -> int:
    from megathunder.learner.model.weights.convert_folder import FileLayout, to_hf, to_megatron

    if arguments.command == "to-hf":
        return to_hf(arguments.source, arguments.target, file_bytes=int(arguments.file_gb * 1e9))
    layout = FileLayout(tensor=arguments.tensor, pipeline=arguments.pipeline, expert=arguments.expert)
    return to_megatron(arguments.source, arguments.target, layout)


if __name__ == "__main__":
    sys.exit(main())
