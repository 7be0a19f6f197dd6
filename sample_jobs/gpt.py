"""A small GPT and text for it, for the jobs that train language models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

VOCABULARY = 256
"""Every byte is a token."""

_SYLLABLES = ("ba", "do", "fi", "gu", "ke", "lo", "ma", "nu", "po", "ra", "si", "tu")


@dataclass(frozen=True)
class Size:
    """The size of a GPT: layers, heads of attention, channels, and tokens that it sees at once."""

    layers: int = 2
    heads: int = 4
    channels: int = 64
    context: int = 64


class Block(nn.Module):
    """Layer of a transformer: causal attention, then a feed-forward network.

    Maps ``[batch, tokens, channels]`` to the same shape.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.channels)
        self.attention = nn.Linear(size.channels, 3 * size.channels)
        self.projection = nn.Linear(size.channels, size.channels)
        self.norm2 = nn.LayerNorm(size.channels)
        self.feed_forward = nn.Sequential(
            nn.Linear(size.channels, 4 * size.channels),
            nn.GELU(),
            nn.Linear(4 * size.channels, size.channels),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the layer's output."""
        batch, tokens, channels = inputs.shape
        shape = (batch, tokens, 3, self.heads, channels // self.heads)
        query, key, value = self.attention(self.norm1(inputs)).view(shape).unbind(dim=2)
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        hidden: Tensor = inputs + self.projection(attended.transpose(1, 2).reshape(inputs.shape))
        outputs: Tensor = hidden + self.feed_forward(self.norm2(hidden))
        return outputs


class GPT(nn.Module):
    """Predicts the next byte at every place.

    Maps tokens, int64 ``[batch, tokens]``, to logits ``[batch, tokens, 256]``.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, size.channels)
        self.place_embedding = nn.Embedding(size.context, size.channels)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.channels)
        self.head = nn.Linear(size.channels, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.place_embedding(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy per token, in nats, of ``[batch, tokens]`` targets."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, each of ``context`` tokens, with the tokens that follow them."""

    def __init__(self, text: bytes, context: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens and the next token of each, both int64 ``[context]``."""
        start = index * self.context
        piece = self.tokens[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


def write_text(length: int, seed: int) -> bytes:
    """Return ``length`` bytes of made-up words, some far more frequent than others."""
    generator = torch.Generator().manual_seed(seed)
    syllables = torch.randint(len(_SYLLABLES), (50, 3), generator=generator).tolist()
    words = ["".join(_SYLLABLES[each] for each in word) for word in syllables]
    frequency = 1.0 / torch.arange(1, len(words) + 1)
    chosen = torch.multinomial(frequency, length // 7 + 1, replacement=True, generator=generator)
    return " ".join(words[each] for each in chosen.tolist()).encode()[:length]


def load_text(path: Path | None, length: int, seed: int, context: int) -> tuple[Windows, Windows]:
    """Return the training and the validation part, a tenth, of a file's text or a made-up one.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is too short for two pieces.
    """
    text = write_text(length, seed) if path is None else path.read_bytes()
    cut = len(text) * 9 // 10
    training, validation = Windows(text[:cut], context), Windows(text[cut:], context)
    if not len(training) or not len(validation):
        raise ValueError(f"{len(text)} bytes are too few for pieces of {context}")
    return training, validation
