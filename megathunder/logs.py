"""Warnings of this package: shown and kept whatever other libraries do to the root logger.

The logger `megathunder` has a level and handlers of its own, so a library that raises the root logger's level or takes
its handlers away hides nothing. Called by the processes of a run when they start.
"""

from __future__ import annotations

import logging
from pathlib import Path

FORMAT = "%(levelname)s %(name)s: %(message)s"


def configure_logging(file: Path | None = None) -> None:
    """Warnings go to stderr, and to `file` where one is given. Calling it again replaces what was configured."""
    logger = logging.getLogger("megathunder")
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file, delay=True))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FORMAT if handler is handlers[0] else f"%(asctime)s {FORMAT}"))
    for old in logger.handlers:
        old.close()
    logger.handlers, logger.propagate = handlers, False
    logger.setLevel(logging.WARNING)
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
