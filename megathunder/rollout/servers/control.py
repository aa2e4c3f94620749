"""The endpoints that change a server: weights, version, prefix cache, aborts.

Called by publish/ (learner rank 0) and by the coordinator. A call that is refused, fails or exceeds its limit
raises InfrastructureFailure with what the server said; nothing is retried, since a weight update is not idempotent.

    SGLang    an update by tensors or by a process group
    0.5.20    is accepted at any time; the server must be idle, or a flush with it ends the server
    0.5.23    must stand between /begin_weight_update and /end_weight_update

`open_update` asks a server for its version, refuses one that is not in this table, and ends and awaits what runs.
"""

from __future__ import annotations

import base64
from types import TracebackType
from typing import TypeVar

import aiohttp
import msgspec

from megathunder.errors import InfrastructureFailure, UserError
from megathunder.rollout.servers.protocol import (
    Loads,
    ModelInfo,
    Outcome,
    ServerInfo,
    ServerState,
    SpeculationCounts,
    policy_version,
)
from megathunder.rollout.servers.server import authorization
from megathunder.types import ServerAddress

Answer = TypeVar("Answer")
IDLE_LIMIT_S = 5.0
HAS_UPDATE_SESSION = {"0.5.20": False, "0.5.23": True}


class ServerControl:
    """`async with ServerControl(...) as control:`; `timeout_s` limits every call."""

    def __init__(self, *, timeout_s: float, api_key: str = "") -> None:
        self._timeout_s, self._api_key = timeout_s, api_key
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ServerControl:
        limit = aiohttp.ClientTimeout(total=self._timeout_s)
        fresh = aiohttp.TCPConnector(force_close=True)  # a server ends idle connections, at worst as a call is sent
        self._session = aiohttp.ClientSession(timeout=limit, headers=authorization(self._api_key), connector=fresh)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def version(self, server: ServerAddress) -> int:
        """The policy version the server holds; -1 if it was never given one."""
        return policy_version((await self._call("GET", server, "/model_info", None, ModelInfo)).weight_version)

    async def info(self, server: ServerAddress) -> ServerInfo:
        """What the server is. Raises UserError for a version of SGLang whose update endpoints are not known here."""
        info = await self._call("GET", server, "/server_info", None, ServerInfo)
        if info.version not in HAS_UPDATE_SESSION:
            raise UserError(
                f"{server.name} at {server.url} runs SGLang {info.version}",
                expected=f"SGLang {' or '.join(HAS_UPDATE_SESSION)}: weight updates differ between versions",
                remedy="install one of these for the servers, or add the version to rollout/servers/control.py",
            )
        return info

    async def open_update(self, server: ServerAddress) -> ServerInfo:
        """Make the server ready for new weights: known, idle, its cache empty, its update session open."""
        info = await self.info(server)
        await self.abort(server)
        await self.flush_cache(server)
        if HAS_UPDATE_SESSION[info.version]:
            try:
                await self._act(server, "/begin_weight_update", {})
            except InfrastructureFailure as failure:
                if "already open" not in str(failure):
                    raise
                await self._act(server, "/end_weight_update", {})  # a learner that died left it open
                await self._act(server, "/begin_weight_update", {})
        return info

    async def close_update(self, server: ServerAddress, info: ServerInfo) -> None:
        """End what `open_update` opened."""
        if HAS_UPDATE_SESSION[info.version]:
            await self._act(server, "/end_weight_update", {})

    async def set_version(self, server: ServerAddress, version: int) -> None:
        """Rename the weights the server holds, without changing them."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._act(server, "/update_weight_version", body)

    async def init_update_group(
        self, server: ServerAddress, *, host: str, port: int, group_name: str, backend: str, ranks: int = 1
    ) -> None:
        """Make the server's ranks 1 to `ranks` of a process group whose rank 0 serves the store at host:port."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + ranks,
            "group_name": group_name,
            "backend": backend,
        }
        await self._act(server, "/init_weights_update_group", body)

    async def destroy_update_group(self, server: ServerAddress, *, group_name: str) -> None:
        await self._act(server, "/destroy_weights_update_group", {"group_name": group_name})

    async def update_from_distributed(
        self,
        server: ServerAddress,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        version: int | None,
        flush_cache: bool | None = None,
    ) -> None:
        """Receive one bucket, the tensors' bytes one after the other, from rank 0 of the group. With `version`, it is
        the last bucket: the prefix cache is flushed and the weights are called that from now on."""
        body: dict[str, object] = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group_name,
            "flush_cache": version is not None if flush_cache is None else flush_cache,
            "load_format": "flattened_bucket",
        }
        if version is not None:
            body["weight_version"] = str(version)
        await self._act(server, "/update_weights_from_distributed", body)

    async def update_from_tensors(self, server: ServerAddress, *, tensors: bytes, loader: str, ranks: int) -> None:
        """Give each of the server's ranks `tensors`, encoded as its endpoint takes them, for `loader`, and flush."""
        text = base64.b64encode(tensors).decode()
        body = {"serialized_named_tensors": [text] * ranks, "load_format": loader, "flush_cache": True}
        await self._act(server, "/update_weights_from_tensor", body)

    async def parameter(self, server: ServerAddress, name: str) -> list[float]:
        """What the server's model answers to a query for `name`."""
        return await self._call("POST", server, "/get_weights_by_name", {"name": name}, list[float])

    async def update_from_disk(self, server: ServerAddress, *, folder: str, version: int | None = None) -> None:
        """Load the weights of a Hugging Face folder that the server can read, flush, and call them `version`."""
        body = {"model_path": folder} | ({"weight_version": str(version)} if version is not None else {})
        await self._act(server, "/update_weights_from_disk", body)

    async def requests(self, server: ServerAddress) -> int:
        """Requests the server has, running and waiting."""
        loads = await self._call("GET", server, "/v1/loads?include=core", None, Loads)
        return sum(load.num_running_reqs + load.num_waiting_reqs for load in loads.loads)

    async def set_state(self, server: ServerAddress, numbers: dict[str, float]) -> None:
        """Change settings of a running server by name."""
        answers = await self._call("POST", server, "/set_internal_state", {"server_args": numbers}, list[bool])
        if not all(answers):
            raise InfrastructureFailure(f"{server.name}/set_internal_state refused {numbers}")

    async def speculation(self, server: ServerAddress) -> SpeculationCounts | None:
        """What the server has drafted since it started; None where it does not draft."""
        state = await self._call("GET", server, "/server_info", None, ServerState)
        return state.internal_states[0].speculation if state.internal_states else None

    async def flush_cache(self, server: ServerAddress) -> None:
        """Empty the prefix cache; refused by a server that still has requests."""
        await self._call("POST", server, f"/flush_cache?timeout={IDLE_LIMIT_S}", None, None)

    async def abort(self, server: ServerAddress, *, rid: str = "") -> None:
        """End request `rid`, or every request of the server."""
        await self._call("POST", server, "/abort_request", {"rid": rid} if rid else {"abort_all": True}, None)

    async def _act(self, server: ServerAddress, path: str, body: dict[str, object]) -> None:
        outcome = await self._call("POST", server, path, body, Outcome)
        if not outcome.success:
            raise InfrastructureFailure(f"{server.name}{path} was refused: {outcome.message}")

    async def _call(
        self, method: str, server: ServerAddress, path: str, body: object, answer: type[Answer] | None
    ) -> Answer | None:
        try:
            async with self._session.request(method, server.url + path, json=body) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise InfrastructureFailure(f"{server.name}{path} failed: {type(error).__name__} {error}") from error
        if response.status != 200:
            raise InfrastructureFailure(f"{server.name}{path} answered {response.status}: {_short(content)}")
        try:
            return msgspec.json.decode(content, type=answer) if answer else None
        except msgspec.DecodeError as error:
            raise InfrastructureFailure(f"{server.name}{path} answered {_short(content)}: {error}") from error


def _short(content: bytes) -> str:
    return content[:300].decode(errors="replace").strip()
