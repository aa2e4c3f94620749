"""Configuration: one frozen dataclass a room; TOML files and dotted command-line overrides; checks in one place."""

from megathunder.config.root import Config

__all__ = ["Config"]
