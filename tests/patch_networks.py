"""Small networks of image patches, written out as in timm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vision_networks import Apply


class SelfAttention(nn.Module):
    """As in timm: one Linear for queries, keys and values, written out or by torch's fused function."""

    def __init__(self, width: int, heads: int, fused: bool = True) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.fused = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            h = F.scaled_dot_product_attention(q, k, v)
        else:
            h = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.proj(h.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, width: int, heads: int = 2, fused: bool = True) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), SelfAttention(width, heads, fused)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """With a class token; with a second token and head, which are averaged, as in DeiT."""

    def __init__(self, distilled: bool = False, width: int = 6) -> None:
        super().__init__()
        self.patch, self.tokens = nn.Conv2d(2, width, 3, 3), 2 if distilled else 1
        self.cls_token = nn.Parameter(torch.randn(1, self.tokens, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 4 + self.tokens, width))
        self.blocks = nn.Sequential(Transformer(width, fused=not distilled), Transformer(width))
        self.norm, self.heads = nn.LayerNorm(width), nn.ModuleList(nn.Linear(width, 3) for _ in range(self.tokens))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        x = self.norm(self.blocks(x))
        return torch.stack([head(x[:, i]) for i, head in enumerate(self.heads)]).mean(0)


class Swin(nn.Module):
    """Attention in windows, the second time shifted; windows and examples share a dimension."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.patch, self.blocks = nn.Conv2d(2, width, 2, 2), nn.ModuleList([Transformer(width), Transformer(width)])
        self.merge, self.norm, self.head = nn.Linear(4 * width, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)  # (N, 4, 4, width)
        for shift, block in enumerate(self.blocks):
            x = x.roll((-shift, -shift), (1, 2))
            windows = x.unflatten(1, (2, 2)).unflatten(3, (2, 2)).transpose(2, 3).reshape(-1, 4, x.shape[-1])
            windows = block(windows).reshape(len(x), 2, 2, 2, 2, -1)
            x = windows.transpose(2, 3).reshape(x.shape).roll((shift, shift), (1, 2))
        x = torch.cat([x[:, i::2, j::2] for i in range(2) for j in range(2)], -1)
        return self.head(self.norm(self.merge(x)).mean((1, 2)))


class Mixer(nn.Module):
    """An MLP over patches, then one over channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 5), nn.GELU(), nn.Linear(5, patches))
        self.channels = nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class SpatialGate(nn.Module):
    """gMLP: one half of the channels is multiplied by a projection of the other along patches."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.gate_norm, self.spatial, self.out = (
            nn.LayerNorm(width),
            nn.Linear(patches, patches),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.wide(self.norm(x))).chunk(2, -1)
        return x + self.out(u * self.spatial(self.gate_norm(v).mT).mT)


def patches(block: nn.Module, width: int) -> nn.Module:
    """Patches of an image, a block, and a head at the mean."""
    split = Apply(lambda x: x.flatten(2).mT)
    return nn.Sequential(nn.Conv2d(2, width, 3, 3), split, block, Apply(lambda x: x.mean(1)), nn.Linear(width, 3))
