"""Networks for simulated workers: one module for all, no hidden state, no random layers.

All of them run with convolutions in bf16 and in channels_last, and can be captured in a CUDA graph.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from regtopk.lab.experiments.data.examples import Pixels
from regtopk.lab.experiments.networks.efficientnet import MEAN, STD, EfficientNetLite0
from regtopk.lab.experiments.networks.gpt import GPT
from regtopk.lab.experiments.networks.resnet import resnet18
from regtopk.lab.experiments.networks.small_cnn import SmallCnn
from regtopk.lab.experiments.networks.weights import load_weights

__all__ = ["NETWORKS", "load_weights"]

# each takes the number of classes, or of characters
NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "resnet18": resnet18,
    "resnet18-gn": partial(resnet18, norm="group"),
    "resnet18-imagenet": partial(resnet18, stem="imagenet"),
    "efficientnet-lite0": EfficientNetLite0,
    "gpt": GPT,
    "small-cnn": SmallCnn,
}

# mean and standard deviation that published weights expect of pixels; others take the data set's own
PIXELS = {
    "efficientnet-lite0": Pixels((MEAN,), (STD,)),
    "resnet18-imagenet": Pixels((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # as torchvision's weights
}
