"""Small images for networks that expect larger ones."""

from torch import Tensor
from torch.nn import functional as F


def enlarge(images: Tensor, image_size: int) -> Tensor:
    """Images (B, C, image_size, image_size), bilinear; as they are where they have that size.

    Done in every step, so that a data set stays on the device at its own size.
    """
    if images.shape[2:] == (image_size, image_size):
        return images
    return F.interpolate(images, (image_size, image_size), mode="bilinear", align_corners=False)
