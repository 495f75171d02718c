"""Networks that see images: ResNet-18 (He et al., 2016), and a tiny one for quick runs on a CPU."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.lab.experiments.networks.norm import BatchNorm, GroupNorm

MakeNorm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two convolutions 3 x 3 and a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: MakeNorm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = norm(channels_out)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, norm(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        """relu(shortcut(x) + residual(x))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.bn2(self.conv2(x))
        return F.relu(x + shortcut, inplace=True)


class ResNet18(nn.Module):
    """A stem 3 x 3 for images of 32 pixels, four layers of two blocks, and a linear head `fc`.

    Names and first values of parameters are torchvision's: 11,173,962 parameters with ten classes. `norm`
    makes a normalisation of so many channels.
    """

    def __init__(self, num_classes: int = 10, norm: MakeNorm = BatchNorm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = norm(64)
        self.layer1 = _make_layer(64, 64, 1, norm)
        self.layer2 = _make_layer(64, 128, 2, norm)
        self.layer3 = _make_layer(128, 256, 2, norm)
        self.layer4 = _make_layer(256, 512, 2, norm)
        self.fc = nn.Linear(512, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Scores (B, num_classes) of images (B, 3, H, W)."""
        x = F.relu(self.bn1(self.conv1(images)), inplace=True)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


def _make_layer(channels_in: int, channels_out: int, stride: int, norm: MakeNorm) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(channels_in, channels_out, stride, norm), BasicBlock(channels_out, channels_out, 1, norm)
    )


class SmallCnn(nn.Module):
    """Three convolutions of stride 2 with batch norm, and a linear head `fc`: 19,546 parameters in all."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in pairwise((3, 16, 32, 48)):
            conv = nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False)
            layers += [conv, BatchNorm(b), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(48, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (B, num_classes) of images (B, 3, H, W), or (B, 1, H, W): grey ones."""
        scores: Tensor = self.fc(self.features(images.expand(-1, 3, -1, -1)).mean((2, 3)))
        return scores


# each takes the number of classes
NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "resnet18": ResNet18,
    "resnet18-gn": partial(ResNet18, norm=GroupNorm),
    "small-cnn": SmallCnn,
}
