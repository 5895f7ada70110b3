"""The models that bench/torch trains: of each the network, which returns its loss, and a batch of random data."""

import time

import torch
from torch import nn
from torch.nn import functional

TOKENS = 64  # of a batch of GPT-2's
IMAGES = 32  # of a batch of a network's for images that ends in large layers


def convolution(inputs, outputs, size, stride=1):
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inner, stride, before):
        super().__init__()
        self.layers = nn.Sequential(*convolution(before, inner, 1), nn.ReLU(), *convolution(inner, inner, 3, stride),
                                    nn.ReLU(), *convolution(inner, 4 * inner, 1))
        same = stride == 1 and before == 4 * inner
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(before, 4 * inner, 1, stride))
        self.last = nn.ReLU()

    def forward(self, x):
        return self.last(self.layers(x) + self.shortcut(x))


class ResNet50(nn.Module):
    def __init__(self):
        super().__init__()
        blocks, before = [], 64
        for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for place in range(count):
                blocks.append(Bottleneck(inner, stride if place == 0 else 1, before))
                before = 4 * inner
        self.layers = nn.Sequential(*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks,
                                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))

    def forward(self, batch):
        images, labels = batch
        return functional.cross_entropy(self.layers(images), labels)

    @staticmethod
    def batch():
        return torch.randn(2, 3, 64, 64), torch.randint(1000, (2,))


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.attention(self.ln_1(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.narrow(functional.gelu(self.wide(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 small: 124.4 million parameters in 148 keys. The head has the weight of the embedding."""

    factors = {"layers.*": TOKENS}

    def __init__(self, symbols=50257, context=1024, width=768, layers=12, heads=12):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, batch):
        x = self.wte(batch[:, :-1]) + self.wpe(torch.arange(batch.shape[1] - 1))
        symbols = functional.linear(self.ln_f(self.layers(x)), self.wte.weight)
        return functional.cross_entropy(symbols.flatten(0, 1), batch[:, 1:].flatten())

    def batch(self):
        return torch.randint(self.wte.num_embeddings, (1, TOKENS + 1))


class FullyConnected(nn.Module):
    """What ends a network for images: layers of these sizes, with ReLU between them."""

    factors = {"classifier.*": IMAGES}

    def __init__(self, *sizes, features=None, pixels=0):
        super().__init__()
        self.size = (3, pixels, pixels) if features else (sizes[0],)
        layers = [nn.Linear(before, after) for before, after in zip(sizes, sizes[1:])]
        self.features = features or nn.Identity()
        self.classifier = nn.Sequential(*(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1])

    def forward(self, batch):
        inputs, labels = batch
        return functional.cross_entropy(self.classifier(self.features(inputs).flatten(1)), labels)

    def batch(self):
        classes = self.classifier[-1].out_features
        return torch.randn(IMAGES, *self.size), torch.randint(classes, (IMAGES,))


def alexnet():
    """61 million parameters, of one column; its images are of 64 x 64 points, to compute less."""
    def layer(before, after, size, stride=1):
        return [nn.Conv2d(before, after, size, stride, size // 2), nn.ReLU()]

    features = nn.Sequential(*layer(3, 64, 11, 4), *layer(64, 192, 5), nn.MaxPool2d(3, 2), *layer(192, 384, 3),
                             *layer(384, 256, 3), *layer(256, 256, 3), nn.AdaptiveAvgPool2d(6))
    return FullyConnected(9216, 4096, 4096, 1000, features=features, pixels=64)


class KeysOfGPT2(nn.Module):
    """Its keys, with hardly any computation: the loss is the sum of all parameters."""

    def __init__(self):
        super().__init__()
        for name, parameter in GPT2().named_parameters():
            self.register_parameter(name.replace(".", "/"), parameter)

    def forward(self, _batch):
        return torch.stack([parameter.sum() for parameter in self.parameters()]).sum()

    @staticmethod
    def batch():
        return torch.empty(0)


class Waits(torch.autograd.Function):
    """Takes the time that a GPU computes, and leaves the processor free: in backward() twice that of forward()."""

    @staticmethod
    def forward(context, x, seconds):
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(2 * context.seconds)
        return gradient, None


class Waiting(nn.Module):
    """2 MiB of parameters, in layers that hardly compute, and wait for 40 ms: each, or the last for all."""

    count, width, step_s = 8, 256, 0.040

    def __init__(self, each=True):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.count)))
        self.waits = [1 / self.count] * self.count if each else [0] * (self.count - 1) + [1]

    def forward(self, batch):
        x = batch
        for layer, share in zip(self.layers, self.waits):
            x = torch.tanh(layer(x))
            if share:
                x = Waits.apply(x, share * self.step_s / 3)
        return x.square().mean()

    def batch(self):
        return torch.randn(1, self.width)


MODELS = {
    "resnet50": ResNet50,
    "gpt2": GPT2,
    "gpt2-4": lambda: GPT2(layers=4),
    "alexnet": alexnet,
    "vgg16-classifier": lambda: FullyConnected(25088, 4096, 4096, 1000),
    "mlp": lambda: FullyConnected(4096, 4096, 4096, 4096),
    "gpt-35m": lambda: GPT2(symbols=8192, context=TOKENS, width=512, layers=10, heads=8),
    "gpt2-keys": KeysOfGPT2,
    "waiting": lambda: Waiting(each=False),
    "waiting-layers": Waiting,
    "tiny": lambda: GPT2(symbols=128, context=TOKENS, width=48, layers=2, heads=4),
}
