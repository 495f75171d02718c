"""A tiny convolutional network, for quick runs on a CPU."""

from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.lab.experiments.networks.norm import BatchNorm


class SmallCnn(nn.Module):
    """Three convolutions of stride 2 with batch norm, and a linear head `fc`: 19,546 parameters in all."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.bn1 = BatchNorm(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.bn2 = BatchNorm(32)
        self.conv3 = nn.Conv2d(32, 48, 3, stride=2, padding=1, bias=False)
        self.bn3 = BatchNorm(48)
        self.fc = nn.Linear(48, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (B, num_classes) of images (B, 3, H, W), or (B, 1, H, W): grey ones."""
        x = F.relu(self.bn1(self.conv1(images.expand(-1, 3, -1, -1))), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        x = F.relu(self.bn3(self.conv3(x)), inplace=True)
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores
