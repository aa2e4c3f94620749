"""Stand-in for torchvision.transforms.functional: every function exists and refuses."""

from collections.abc import Callable

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(f"torchvision is a stand-in on this server: {name} needs the real one")

    return refuse
