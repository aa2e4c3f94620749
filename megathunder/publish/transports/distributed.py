"""Full weights over a process group per server: the server is told a bucket's layout over HTTP, and receives its bytes.

    for each bucket:   POST /update_weights_from_distributed (names, types, shapes)   to every server, at once
                       broadcast the bucket's bytes                                   in every server's group, at once
    the last bucket flushes the prefix cache; then every server says what it holds

One bucket travels while the next one is packed: peak extra memory is two buckets. gloo on CPU, nccl on GPU.
"""

from __future__ import annotations

from concurrent.futures import Future

from megathunder.publish.acknowledge import Manifest, adopt_everywhere
from megathunder.publish.buckets import Bucket, buckets
from megathunder.publish.group import Pairs
from megathunder.publish.publish_session import PublishSession
from megathunder.publish.transports.base import Weights
from megathunder.types import ServerAddress


class DistributedTransport:
    """`pairs` are shared with a delta transport that uses the same groups."""

    def __init__(self, pairs: Pairs, *, bucket_bytes: int, checksum: bool = True) -> None:
        self._pairs, self._bucket_bytes, self._checksum = pairs, bucket_bytes, checksum

    def send(self, round: PublishSession, servers: tuple[ServerAddress, ...], version: int, weights: Weights) -> int:
        """See `Transport.send`."""
        round.each(lambda server: self._pairs.join(round.control, server, round.info[server].tp_size), servers)
        manifest = Manifest()
        travelling = None
        for bucket in buckets(manifest.watch(weights), self._bucket_bytes):
            if travelling:
                travelling.result()
            travelling = self._start(round, servers, bucket)
        if travelling:
            travelling.result()
        adopt_everywhere(round, servers, manifest, version, checksum=self._checksum)
        return manifest.payload_bytes

    def _start(self, round: PublishSession, servers: tuple[ServerAddress, ...], bucket: Bucket) -> Future[None]:
        async def one(server: ServerAddress) -> None:
            told = round.control.update_from_distributed(
                server,
                names=bucket.names,
                dtypes=bucket.dtypes,
                shapes=bucket.shapes,
                group_name=self._pairs[server].name,
                version=None,
                flush_cache=True,
            )
            await self._pairs.exchange(server, told, bucket.data)

        return round.start(one, servers)
