"""ResNet-18 (He et al., 2016), with torchvision's parameter names."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.errors import ArgumentError
from regtopk.lab.experiments.networks.norm import BatchNorm, GroupNorm

Stem = Literal["cifar", "imagenet"]
Norm = Literal["batch", "group"]
NORMS: dict[str, type[BatchNorm] | type[GroupNorm]] = {"batch": BatchNorm, "group": GroupNorm}
CHANNELS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Two convolutions 3 x 3 and a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        make_norm = NORMS[norm]
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = make_norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = make_norm(channels_out)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, make_norm(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        """relu(shortcut(x) + residual(x))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.bn2(self.conv2(x))
        return F.relu(x + shortcut, inplace=True)


class ResNet18(nn.Module):
    """A stem, four layers of two blocks, and a linear head `fc` on the mean over the image."""

    def __init__(self, num_classes: int, stem: Stem, norm: Norm) -> None:
        super().__init__()
        self.stem = stem
        if stem == "cifar":
            self.conv1 = nn.Conv2d(3, CHANNELS[0], 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(3, CHANNELS[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = NORMS[norm](CHANNELS[0])
        self.layer1 = _make_layer(CHANNELS[0], CHANNELS[0], 1, norm)
        self.layer2 = _make_layer(CHANNELS[0], CHANNELS[1], 2, norm)
        self.layer3 = _make_layer(CHANNELS[1], CHANNELS[2], 2, norm)
        self.layer4 = _make_layer(CHANNELS[2], CHANNELS[3], 2, norm)
        self.fc = nn.Linear(CHANNELS[3], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Scores (B, num_classes) of images (B, 3, H, W)."""
        x = F.relu(self.bn1(self.conv1(images)), inplace=True)
        if self.stem == "imagenet":
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


def _make_layer(channels_in: int, channels_out: int, stride: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(channels_in, channels_out, stride, norm), BasicBlock(channels_out, channels_out, 1, norm)
    )


def resnet18(num_classes: int = 10, stem: Stem = "cifar", norm: Norm = "batch") -> ResNet18:
    """ResNet-18, initialised as torchvision's is.

    Args:
        num_classes: outputs of the head.
        stem: "cifar" is a convolution 3 x 3 without pooling, for images of about 32 pixels (11,173,962
            parameters with ten classes); "imagenet" is the original 7 x 7 with stride 2 and max-pooling, for
            224 pixels.
        norm: "batch" (see norm.py) or "group", under the same names.
    """
    if stem not in ("cifar", "imagenet"):
        raise ArgumentError(f"stem must be cifar or imagenet, got {stem!r}")
    if norm not in NORMS:
        raise ArgumentError(f"norm must be {' or '.join(NORMS)}, got {norm!r}")
    return ResNet18(num_classes, stem, norm)
