"""The table of small architectures; tests/contract/test_architectures.py runs the rules that use layers on every entry.

Widths are tiny, weights float64. A batch has few examples, in some entries as many as there are positions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import patch_networks as patch
import sequence_networks as seq
import unusual_networks as odd
import vision_networks as vis

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Architecture:
    """One model and its data.

    Args:
        make: builds the model.
        data: example inputs, given their number.
        likelihood: of the outputs.
        notes: what is unusual about it.
        examples: the number of examples.
        needs: a package that `make` imports.
        wide: builds the same model with a width at which most parameters are in matrices.
    """

    name: str
    make: Callable[[], nn.Module]
    data: Callable[[int], Inputs]
    likelihood: str = "categorical"
    notes: str = ""
    examples: int = 4
    needs: str = ""
    wide: Callable[[], nn.Module] | None = None

    def missing(self) -> bool:
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None

    def build(self, make: Callable[[], nn.Module] | None = None) -> nn.Module:
        """The model in evaluation mode, with random weights and statistics; the same in each call.

        Args:
            make: instead of its own.
        """
        if self.missing():
            pytest.skip(f"{self.needs} is not installed")
        torch.manual_seed(1)
        model = (make or self.make)().double().eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in dict.fromkeys(model.parameters()):
                p.add_(0.1 * torch.randn(p.shape, dtype=p.dtype, generator=generator))
            for module in model.modules():
                if isinstance(module, _BatchNorm) and module.running_mean is not None:
                    module.running_mean.copy_(torch.randn(module.running_mean.shape, generator=generator) / 5)
                    module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
        return model

    def inputs(self) -> Inputs:
        torch.manual_seed(3)
        return tuple(x.double() if x.is_floating_point() else x for x in self.data(self.examples))

    def labels(self, outputs: Tensor, seed: int = 4) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.likelihood == "categorical":
            return torch.randint(outputs.shape[-1], outputs.shape[:-1], generator=generator)
        noise = torch.randn(outputs.shape, dtype=torch.float64, generator=generator)
        return (noise > 0).double() if self.likelihood == "bernoulli" else noise


def reals(*shapes: tuple[int, ...]) -> Callable[[int], Inputs]:
    return lambda n: tuple(torch.randn(n, *shape) for shape in shapes)


def words(*lengths: int, count: int = seq.WORDS) -> Callable[[int], Inputs]:
    return lambda n: tuple(torch.randint(count, (n, length)) for length in lengths)


def typed_words(length: int) -> Callable[[int], Inputs]:
    """Words, of which the last one is padding in one example, and token types."""

    def make(n: int) -> Inputs:
        x = torch.randint(1, seq.WORDS, (n, length))
        x[0, -1] = 0
        return x, torch.randint(2, (n, 1)).expand(n, length).contiguous()

    return make


# --- the models of packages, from configurations ---


class Logits(nn.Module):
    """The logits of a model that returns a structure."""

    def __init__(self, model: Any, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, inputs)), return_dict=True).logits


def small(width: int) -> dict[str, Any]:
    shape = dict(hidden_size=width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=2 * width)
    return {**shape, "num_labels": 3, "attn_implementation": "sdpa"}


def transformers_gpt2(width: int = 4) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = dict(vocab_size=7, n_positions=8, n_embd=width, n_layer=1, n_head=2, n_inner=2 * width)
    tokens = dict(bos_token_id=0, eos_token_id=0)
    return Logits(GPT2LMHeadModel(GPT2Config(**shape, **tokens, use_cache=False)), "input_ids")  # pyright: ignore


def transformers_bert(width: int = 4) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=7, max_position_embeddings=8, type_vocab_size=2, **small(width))
    return Logits(BertForSequenceClassification(config), "input_ids", "token_type_ids")


def transformers_vit(width: int = 4) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=6, patch_size=3, num_channels=2, **small(width))
    return Logits(ViTForImageClassification(config), "pixel_values")


def peft_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(odd.mlp(4, 3), config)  # pyright: ignore[reportArgumentType]


WIDE = 64
A = Architecture
ARCHITECTURES = [
    # images
    A("LeNet", vis.lenet, reals((1, 8, 8))),
    A("VGG", vis.vgg, reals((2, 8, 8)), notes="in-place activations"),
    A("AlexNet", vis.alexnet, reals((2, 9, 9)), notes="groups"),
    A("ResNet, GroupNorm", lambda: vis.resnet("group"), reals((2, 6, 6))),
    A("ResNet, BatchNorm", lambda: vis.resnet("batch"), reals((2, 6, 6))),
    A("ResNet bottleneck, GroupNorm", lambda: vis.resnet_bottleneck("group"), reals((2, 6, 6))),
    A("ResNet bottleneck, BatchNorm", lambda: vis.resnet_bottleneck("batch"), reals((2, 6, 6))),
    A("ResNeXt", vis.resnext, reals((2, 6, 6)), notes="groups"),
    A("WideResNet", vis.wide_resnet, reals((2, 5, 5))),
    A("DenseNet", vis.densenet, reals((2, 6, 6))),
    A("SqueezeNet", vis.squeezenet, reals((2, 7, 7))),
    A("GoogLeNet", vis.googlenet, reals((2, 5, 5))),
    A("Inception", vis.inception, reals((2, 6, 6)), notes="asymmetric kernels and strides"),
    A("MobileNetV2", vis.mobilenet_v2, reals((2, 6, 6)), notes="depthwise"),
    A("MobileNetV3", vis.mobilenet_v3, reals((2, 6, 6)), notes="squeeze-excite, hardswish"),
    A("EfficientNet", vis.efficientnet, reals((2, 6, 6)), notes="subclasses of Conv2d and BatchNorm2d"),
    A("ShuffleNet", vis.shufflenet, reals((2, 6, 6)), notes="channel shuffle"),
    A("ConvNeXt", vis.convnext, reals((2, 6, 6)), notes="subclass of LayerNorm, raw scales"),
    A("paddings", vis.paddings, reals((1, 6, 6)), notes="circular, reflect, replicate, same"),
    A("style network", vis.style, reals((2, 7, 7)), notes="InstanceNorm with weights"),
    # images as patches
    A(
        "ViT",
        patch.VisionTransformer,
        reals((2, 6, 6)),
        notes="raw class token and positions",
        wide=lambda: patch.VisionTransformer(width=WIDE),
    ),
    A("DeiT", lambda: patch.VisionTransformer(distilled=True), reals((2, 6, 6)), notes="two tokens, two heads"),
    A("Swin", patch.Swin, reals((2, 8, 8)), notes="windows and examples in one dimension"),
    A("MLP-Mixer", lambda: patch.patches(patch.Mixer(4, 5), 5), reals((2, 6, 6)), notes="Linear along patches"),
    A("gMLP", lambda: patch.patches(patch.SpatialGate(4, 5), 5), reals((2, 6, 6)), notes="Linear along patches"),
    A("PoolFormer", vis.poolformer, reals((2, 6, 6)), notes="raw scales"),
    # dense outputs, points, sequences, videos
    A("U-Net", vis.UNet, reals((1, 4, 4)), notes="ConvTranspose2d; a label for each pixel", examples=3),
    A("autoencoder", vis.autoencoder, reals((1, 4, 4)), "gaussian", "ConvTranspose2d", examples=3),
    A("PointNet", vis.PointNet, reals((3, 5)), notes="Conv1d"),
    A("TCN", vis.tcn, reals((2, 9)), notes="dilated Conv1d"),
    A("video", vis.video, reals((1, 4, 6, 6)), notes="Conv3d"),
    A("char-CNN", seq.char_cnn, words(6), notes="Embedding with padding"),
    # language
    A(
        "GPT-2",
        seq.GPT2,
        words(3),
        notes="Conv1D, tied head, positions once for all examples",
        examples=3,
        wide=lambda: seq.GPT2(WIDE),
    ),
    A(
        "BERT",
        seq.BERT,
        typed_words(4),
        notes="token types, padding, pooler; as many positions as examples",
        wide=lambda: seq.BERT(WIDE),
    ),
    A("T5", seq.T5, words(3, 2), notes="relative biases, own RMSNorm, raw use of the table", examples=3),
    A("LLaMA", seq.LLaMA, words(3), notes="rotary positions, SwiGLU, own RMSNorm", examples=3),
    A("tied head with bias", seq.TiedHead, words(2), examples=3),
    A("biases only", odd.biases_only, words(3), notes="frozen weights"),
    A("LoRA", seq.lora, reals((4,)), notes="frozen layers"),
    # recurrent
    A("LSTM", lambda: seq.Recurrent(nn.LSTM), words(4)),
    A("LSTM, two layers", lambda: seq.Recurrent(nn.LSTM, num_layers=2), words(3)),
    A(
        "LSTM language model",
        lambda: seq.Recurrent(nn.LSTM, language=True),
        words(3),
        examples=3,
        wide=lambda: seq.Recurrent(nn.LSTM, True, WIDE),
    ),
    A("LSTM, bidirectional", lambda: seq.Recurrent(nn.LSTM, bidirectional=True), words(3)),
    A("GRU", lambda: seq.Recurrent(nn.GRU), words(4)),
    A("RNN", lambda: seq.Recurrent(nn.RNN), words(4)),
    A("LSTMCell", seq.Cell, reals((3, 2))),
    # attention of torch
    A("TransformerEncoderLayer", lambda: seq.Encoder(True), words(3)),
    A("TransformerEncoderLayer, positions first", lambda: seq.Encoder(False), words(3)),
    A("TransformerEncoderLayer, as many positions", lambda: seq.Encoder(False, norm_first=True), words(4)),
    A("MultiheadAttention pooling", seq.AttentionPool, reals((5, 3)), notes="a raw query"),
    A("positions first", seq.PositionsFirst, reals((3, 3)), notes="the first dimension of a layer is positions"),
    A("positions first, as many", seq.PositionsFirst, reals((4, 3)), notes="as many positions as examples"),
    # layers used in other ways
    A("siamese", odd.Siamese, reals((4,), (4,)), notes="an encoder called twice"),
    A("siamese, stacked", odd.StackedSiamese, reals((4,), (4,)), notes="twice as many rows as examples"),
    A("DeepSets", odd.DeepSets, reals((3, 3))),
    A("DeepSets, merged", lambda: odd.DeepSets(merged=True), reals((3, 3)), notes="elements and examples merged"),
    A("mixture of experts", odd.Experts, reals((4,))),
    A("mixture of experts, routed", odd.RoutedExperts, reals((4,)), notes="experts see some of the examples"),
    A("hypernetwork", lambda: odd.HyperNetwork(False), reals((4,), (3,)), notes="a layer called once for all examples"),
    A("hypernetwork, each", lambda: odd.HyperNetwork(True), reals((4,), (3,)), notes="weights for each example"),
    A("hypernetwork, update", odd.LowRankUpdate, reals((4,)), notes="a weight with an update, by functional_call"),
    A(
        "scaled weight",
        lambda: odd.ScaledWeight(False),
        reals((4,)),
        notes="a function of the weight, by functional_call",
    ),
    A("scaled weight and bias", lambda: odd.ScaledWeight(True), reals((4,)), notes="the same for both parameters"),
    A("neural ODE", odd.Repeated, reals((3,)), notes="a block called four times"),
    A("permuted", odd.Permuted, reals((4,)), notes="an encoder called twice, the examples in different orders"),
    A("shared layers", lambda: odd.SharedLayers(0.0), reals((4,)), notes="two modules with one weight"),
    A(
        "shared layers, read directly",
        lambda: odd.SharedLayers(0.02),
        reals((4,)),
        notes="a small part of the gradient",
    ),
    A("Perceiver", odd.Perceiver, reals((5, 3)), notes="a layer called once for all; as many latents as examples"),
    A("graph network", odd.GraphNetwork, reals((5, 2), (5, 5)), notes="PReLU"),
    A("hooks", odd.hooked, reals((4,)), notes="hooks that change input and output"),
    A("checkpointed", odd.Checkpointed, reals((4,))),
    A("pruned", odd.pruned, reals((4,)), notes="a mask on a weight"),
    A("weight norm", odd.weight_normed, reals((4,)), notes="parametrisation"),
    A("spectral norm", odd.spectral_normed, reals((4,)), notes="parametrisation"),
    A("Bilinear", odd.Bilinear, reals((3,), (2,))),
    A(
        "recommender",
        odd.Recommender,
        lambda n: (torch.randint(6, (n,)), torch.randint(8, (n, 3))),
        "bernoulli",
        "EmbeddingBag",
    ),
    A("NeRF", odd.NeRF, reals((3, 3)), "gaussian", "a skip connection, points along rays"),
    A("regression", lambda: odd.mlp(3, 2), reals((3,)), "gaussian"),
    A("multi-label", lambda: odd.mlp(3, 4, nn.SiLU), reals((3,)), "bernoulli"),
    # packages
    A(
        "transformers GPT-2",
        transformers_gpt2,
        words(3),
        examples=3,
        needs="transformers",
        wide=lambda: transformers_gpt2(WIDE),
    ),
    A(
        "transformers BERT",
        transformers_bert,
        typed_words(4),
        needs="transformers",
        wide=lambda: transformers_bert(WIDE),
    ),
    A(
        "transformers ViT",
        transformers_vit,
        reals((2, 6, 6)),
        needs="transformers",
        wide=lambda: transformers_vit(WIDE),
    ),
    A("peft LoRA", peft_lora, reals((4,)), needs="peft"),
]
BY_NAME = {one.name: one for one in ARCHITECTURES}
