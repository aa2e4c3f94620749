"""Stand-in for torchvision on a rollout server's path: image inputs are refused, text needs only the names."""

from torchvision import io, transforms

__version__ = "0.0.0+standin"
__all__ = ["io", "transforms"]
