"""Stand-in for torchvision.io: names that SGLang imports at start."""


class ImageReadMode:
    RGB = "RGB"
    UNCHANGED = "UNCHANGED"


def decode_jpeg(*_: object, **__: object) -> None:
    raise NotImplementedError("torchvision is a stand-in on this server: it serves text only")


decode_image = decode_jpeg
