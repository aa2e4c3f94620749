"""Full weights through a folder that learner and servers can read: safetensors, complete or not there at all.

    <folder>/.writing-<version> -> rename -> <folder>/version-<version> -> POST /update_weights_from_disk

The folder is a Hugging Face model folder of its own. The last version is kept (a restarted server reads it), older ones
are removed once the new one is acknowledged.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megathunder.learner.model.weights.hf_files import HfWriter, copy_description
from megathunder.publish.acknowledge import Manifest, adopt_everywhere
from megathunder.publish.publish_session import PublishSession
from megathunder.publish.transports.base import Weights
from megathunder.publish.transports.folder import writing
from megathunder.types import ServerAddress


class DiskTransport:
    """`model` gives config.json and the tokenizer."""

    def __init__(self, folder: Path, model: Path, *, checksum: bool = True) -> None:
        self._folder, self._model, self._checksum = folder, model, checksum

    def send(self, round: PublishSession, servers: tuple[ServerAddress, ...], version: int, weights: Weights) -> int:
        """See `Transport.send`."""
        manifest = Manifest()
        written = self._write(manifest, version, weights)

        async def one(server: ServerAddress) -> None:
            await round.control.update_from_disk(server, folder=str(written))

        round.each(one, servers)
        adopt_everywhere(round, servers, manifest, version, checksum=self._checksum)
        for old in self._folder.glob("version-*"):
            if old != written:
                shutil.rmtree(old, ignore_errors=True)
        return manifest.payload_bytes

    def _write(self, manifest: Manifest, version: int, weights: Weights) -> Path:
        final, partial = self._folder / f"version-{version}", self._folder / f".writing-{version}"
        for left_over in (final, partial):
            shutil.rmtree(left_over, ignore_errors=True)
        with writing(self._folder, partial):
            writer = HfWriter(partial)
            for name, tensor in manifest.watch(weights):
                writer.write(name, tensor)
            writer.close()
            copy_description(self._model, partial)
            return partial.rename(final)
