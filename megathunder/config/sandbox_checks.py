"""Checks of sandboxes: what isolates is installed, and the daemon or the servers that are asked for answer.

Whether they isolate is measured when the run starts (sandbox/). That there is anything to ask is asked here, with one
question each: before a run folder is made, and before servers and learner take their time to start. Called by
`checks.py` and by tools; `ask_daemon` also by sandbox.docker.
"""

from __future__ import annotations

import re
import shutil
import socket
from importlib.util import find_spec
from urllib.parse import urlsplit

from megathunder.config.machine_checks import LOOPBACK, check_urls
from megathunder.config.root import Config
from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import ConfigError, IsolationError

ANSWER_S = 5.0
PORTS = {"http": 80, "https": 443}


def check_sandbox_installed(config: Config) -> None:
    if config.sandbox.backend == "bubblewrap" and shutil.which("bwrap") is None:
        raise ConfigError(
            "sandbox.backend = 'bubblewrap', and no `bwrap` on PATH",
            expected="bubblewrap; commands of a policy never run on the bare host",
            remedy="bash tools/setup.sh, or apt-get install bubblewrap",
        )


def check_docker_sdk(config: Config) -> None:
    """Settings of the two backends."""
    sandbox = config.sandbox
    if sandbox.backend == "docker":
        if find_spec("docker") is None:
            raise ConfigError(
                "sandbox.backend = 'docker', and the Docker SDK is not installed",
                expected="the package docker",
                remedy="pip install -e .[docker], or set sandbox.backend = 'bubblewrap'",
            )
        if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", sandbox.container_user):
            raise ConfigError(
                f"sandbox.container_user = {sandbox.container_user!r}",
                expected="uid:gid as numbers, neither of them 0",
                remedy="set sandbox.container_user = '1000:1000'",
            )
    if sandbox.backend == "remote":
        if not sandbox.urls:
            raise ConfigError(
                "sandbox.backend = 'remote' with no sandbox.urls",
                expected="addresses of sandbox servers",
                remedy="start tools/serve_sandboxes.py where sandboxes should run, and set sandbox.urls",
            )
        check_urls("sandbox.urls", sandbox.urls)
        exposed = [url for url in sandbox.urls if urlsplit(url).hostname not in LOOPBACK]
        if exposed and not sandbox.api_key:
            raise ConfigError(
                f"sandbox.urls names {exposed[0]} with no sandbox.api_key",
                expected="a key for servers that others can reach too",
                remedy="set sandbox.api_key to the key that the servers were started with",
            )


def check_sandbox_servers(config: Config) -> None:
    """The daemon, or every server of `sandbox.urls`."""
    sandbox = config.sandbox
    if sandbox.backend == "docker":
        ask_daemon(sandbox)
    for url in sandbox.urls if sandbox.backend == "remote" else ():
        try:
            parts = urlsplit(url)
            socket.create_connection((parts.hostname or "", parts.port or PORTS[parts.scheme]), ANSWER_S).close()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"the sandbox server {url!r} was not reached: {error}",
                expected="http://HOST:PORT of a server that listens",
                remedy="start tools/serve_sandboxes.py there, or correct sandbox.urls",
            ) from None


def daemon_settings(sandbox: SandboxConfig) -> dict[str, object]:
    """How the Docker SDK reaches the daemon; raises its DockerException where DOCKER_* in the environment are wrong."""
    import docker  # the SDK is installed only where it is asked for

    settings = docker.utils.kwargs_from_env()
    return settings | ({"base_url": sandbox.docker_host} if sandbox.docker_host else {})


def ask_daemon(sandbox: SandboxConfig) -> None:
    """Raise IsolationError unless a daemon answers within `ANSWER_S` and has the usual image."""
    import docker
    from requests.exceptions import RequestException

    try:
        client = docker.APIClient(version="auto", timeout=ANSWER_S, **daemon_settings(sandbox))
        try:
            client.ping()
            client.inspect_image(sandbox.image)
        finally:
            client.close()
    except docker.errors.NotFound:
        raise IsolationError(
            f"the daemon has no image {sandbox.image}",
            expected="the image, already pulled: a run pulls nothing",
            remedy=f"docker pull {sandbox.image}, or set sandbox.image",
        ) from None
    except (docker.errors.DockerException, RequestException, OSError, ValueError) as error:
        raise IsolationError(
            f"no Docker daemon at {sandbox.docker_host or 'DOCKER_HOST or the usual socket'}: {str(error)[:300]}",
            expected="a running daemon; commands of a policy never run on the bare host",
            remedy="start dockerd, set sandbox.docker_host, or set sandbox.backend = 'bubblewrap'",
        ) from None


ALL = (check_sandbox_installed, check_docker_sdk, check_sandbox_servers)
