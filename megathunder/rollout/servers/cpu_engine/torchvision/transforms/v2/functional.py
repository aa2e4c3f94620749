"""Stand-in for torchvision.transforms.v2.functional: the same refusing functions."""

from torchvision.transforms.functional import InterpolationMode, __getattr__

__all__ = ["InterpolationMode", "__getattr__"]
