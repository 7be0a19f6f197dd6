"""The networks for images that the sample jobs train: ResNets and a small CNN."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

BOTTLENECK_EXPANSION = 4
"""Output channels of a bottleneck block per channel of its 3x3 convolution."""


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions, each followed by a BatchNorm; the first has a stride.

    Maps ``[batch, in_channels, height, width]`` to ``[batch, channels, height / stride,
    width / stride]``, sizes rounded up.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(
            in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False
        )
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(in_channels, channels, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the block's output for ``inputs`` of ``[batch, in_channels, height, width]``."""
        hidden: Tensor = self.relu(self.bn1(self.conv1(inputs)))
        hidden = self.bn2(self.conv2(hidden))
        outputs: Tensor = self.relu(hidden + self.shortcut(inputs))
        return outputs


class Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions, each followed by a BatchNorm.

    The stride sits in the 3x3 convolution ("v1.5"). Maps ``[batch, in_channels, height, width]``
    to ``[batch, 4 * width_channels, height / stride, width / stride]``, sizes rounded up.
    """

    def __init__(self, in_channels: int, width_channels: int, stride: int) -> None:
        super().__init__()
        out_channels = width_channels * BOTTLENECK_EXPANSION
        self.conv1 = nn.Conv2d(in_channels, width_channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width_channels)
        self.conv2 = nn.Conv2d(
            width_channels, width_channels, kernel_size=3, stride=stride, padding=1, bias=False
        )
        self.bn2 = nn.BatchNorm2d(width_channels)
        self.conv3 = nn.Conv2d(width_channels, out_channels, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(in_channels, out_channels, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the block's output for ``inputs`` of ``[batch, in_channels, height, width]``."""
        hidden: Tensor = self.relu(self.bn1(self.conv1(inputs)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        outputs: Tensor = self.relu(hidden + self.shortcut(inputs))
        return outputs


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return what a block adds to its output: its input, brought to the same size."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def _stage(
    block: type[BasicBlock | Bottleneck], in_channels: int, width: int, blocks: int, stride: int
) -> nn.Sequential:
    """Return ``blocks`` blocks in a row, the first of which changes the size."""
    out_channels = width * (BOTTLENECK_EXPANSION if block is Bottleneck else 1)
    layers = [block(in_channels, width, stride)]
    layers += [block(out_channels, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(*layers)


def _resnet(
    block: type[BasicBlock | Bottleneck], blocks: tuple[int, int, int, int], num_classes: int
) -> nn.Sequential:
    """Return a freshly initialised ResNet with so many blocks in its four stages."""
    expansion = BOTTLENECK_EXPANSION if block is Bottleneck else 1
    model = nn.Sequential(
        nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        _stage(block, 64, 64, blocks[0], stride=1),
        _stage(block, 64 * expansion, 128, blocks[1], stride=2),
        _stage(block, 128 * expansion, 256, blocks[2], stride=2),
        _stage(block, 256 * expansion, 512, blocks[3], stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512 * expansion, num_classes),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet18(num_classes: int = 1000) -> nn.Sequential:
    """Return a freshly initialised ResNet-18; 11,689,512 parameters with 1000 classes.

    Maps images of ``[batch, 3, height, width]`` to logits of ``[batch, num_classes]``. The last
    feature map is 32 times smaller than the image in each direction, rounded up.
    """
    return _resnet(BasicBlock, (2, 2, 2, 2), num_classes)


def resnet34(num_classes: int = 1000) -> nn.Sequential:
    """Return a freshly initialised ResNet-34; 21,797,672 parameters with 1000 classes."""
    return _resnet(BasicBlock, (3, 4, 6, 3), num_classes)


def resnet50(num_classes: int = 1000) -> nn.Sequential:
    """Return a freshly initialised ResNet-50; 25,557,032 parameters with 1000 classes."""
    return _resnet(Bottleneck, (3, 4, 6, 3), num_classes)


def from_torchvision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a ResNet of torchvision under the names that the ResNets here have."""
    places = {"conv1": "0", "bn1": "1", "fc": "10"}
    places.update({f"layer{number}": str(number + 3) for number in range(1, 5)})
    renamed = {}
    for name, value in state.items():
        first, _, rest = name.partition(".")
        renamed[f"{places.get(first, first)}.{rest.replace('downsample', 'shortcut')}"] = value
    return renamed


def _conv_block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return a 3x3 convolution with BatchNorm and ReLU that halves height and width."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=2),
    )


def small_cnn(num_classes: int = 10) -> nn.Sequential:
    """Return a freshly initialised network of three convolutions that is quick on a CPU.

    Maps images of ``[batch, 3, 32, 32]`` to logits of ``[batch, num_classes]``.
    """
    return nn.Sequential(
        _conv_block(3, 16),
        _conv_block(16, 32),
        _conv_block(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )
