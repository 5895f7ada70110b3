"""Small models of the kinds that people train, and their data."""

from pathlib import Path

import torch
from conftest import SEED
from exact import gradients_of
from torch import nn
from torch.nn import functional

import phub

TEXT = Path("/usr/share/common-licenses/GPL-3")
CONTEXT = 48


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.attention(self.before(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """1.2 million parameters, over bytes."""

    def __init__(self, width=144, blocks=4, heads=4):
        super().__init__()
        self.symbol, self.place = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        self.head.weight = self.symbol.weight  # one parameter with two names

    def forward(self, batch):
        """The loss: predict each next symbol."""
        x = self.symbol(batch[:, :-1]) + self.place.weight[: batch.shape[1] - 1]
        symbols = self.head(self.last(self.blocks(x)))
        return functional.cross_entropy(symbols.flatten(0, 1), batch[:, 1:].flatten())


def text_batch(rank, step, rows=2):
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long() % 128
    random = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(text) - CONTEXT - 1, (rows,), generator=random)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts])


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return functional.relu(x + self.layers(x))


class ResNet(nn.Module):
    """For 16 x 16 images of one channel."""

    def __init__(self, width=16, blocks=2):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            *(Residual(width) for _ in range(blocks)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        )

    def forward(self, batch):
        """The loss."""
        images, labels = batch
        return functional.cross_entropy(self.layers(images), labels)


def image_batch(rank, step, rows=4):
    random = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(rows, 1, 16, 16, generator=random)
    return images, torch.randint(10, (rows,), generator=random)


class Branches(nn.Module):
    """Of which a call uses some."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.branches = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, inputs, used):
        return sum(self.branches[branch](inputs) for branch in used)


def descend(optimizer, loss):
    """A step, and what the loss is."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def make_net():
    """For loss_of; one parameter is frozen."""
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 5), nn.PReLU())
    net[0].bias.requires_grad_(requires_grad=False)
    return net


def differ(net, rank):
    """Each rank begins with other parameters: rank 0's count."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(rank)


def loss_of(net, rank, step):
    random = torch.Generator().manual_seed(SEED + 1000 * step + rank)
    dtype = next(p.dtype for p in net.parameters() if p.requires_grad)
    inputs = torch.randn(8, 12, generator=random).to(dtype)
    labels = torch.randint(5, (8,), generator=random)
    return functional.cross_entropy(net(inputs).float(), labels)


def train(optimizer, net, rank, steps, parts=1, schedule=None):
    """Of a loop as people write it, the gradients of each step."""
    gradients = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            loss_of(net, rank, parts * step + part).backward()
        gradients.append(gradients_of(net))
        optimizer.step()
        if schedule:
            schedule.step()
    return gradients


def recorded(model, **options):
    """phub.ddp, and a list with a step's gradients of this rank, by parameter, that grows."""
    wrapped = phub.ddp(model, **options)
    names = {id(p): name for name, p in model.named_parameters()}
    exchange, steps = wrapped.phub.exchange, []

    def record(bucket):
        if bucket.index() == 0:
            steps.append({})
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            in_order = gradient.as_strided(parameter.shape, parameter.stride())
            steps[-1][names[id(parameter)]] = in_order.clone()
        return exchange(bucket)

    wrapped.phub.exchange = record
    return wrapped, steps


def wrapped(form, net, **options):
    """The module to call, what has sync_buffers() and close(), and the optimizer."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1, momentum=0.9)
    if form == "ddp":
        model = phub.ddp(net, **options)
        return model, model.phub, optimizer
    optimizer = phub.DistributedOptimizer(optimizer, net, **options)
    return net, optimizer, optimizer
