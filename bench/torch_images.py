"""Convolutional networks that bench/torch_loss trains on small generated images, each with the layers of the one that it is
named after: Caffe's cifar10_quick as it is, and AlexNet and GoogLeNet made smaller."""

import torch
from torch import nn
from torch.nn import functional

SIDE, CLASSES = 32, 10
EVALUATED = 500  # images that are held out
HELD_OUT_SEED, CLASSES_SEED = 1 << 40, 1


class Images:
    """Of ten classes, each a pattern of its own: shifted at random, of random contrast, mixed with a weaker pattern of any
    class, and noisy. Whoever has the seed has the images."""

    NOISE, OTHER, SHIFTS = 0.7, 0.6, 8

    def __init__(self):
        random = torch.Generator().manual_seed(CLASSES_SEED)
        coarse = torch.randn(CLASSES, 3, 8, 8, generator=random)
        patterns = functional.interpolate(coarse, size=SIDE, mode="bicubic")
        self.patterns = patterns / patterns.std(dim=(1, 2, 3), keepdim=True)

    def make(self, number, seed):
        random = torch.Generator().manual_seed(seed)
        labels, others = torch.randint(CLASSES, (2, number), generator=random)
        contrast = 0.5 + torch.rand(number, 1, 1, 1, generator=random)
        images = contrast * self._shifted(labels, random) + self.OTHER * self._shifted(others, random)
        return images + self.NOISE * torch.randn(images.shape, generator=random), labels

    def _shifted(self, labels, random):
        shifts = torch.randint(self.SHIFTS, (len(labels), 2), generator=random).tolist()
        return torch.stack([self.patterns[label].roll(shift, (1, 2)) for label, shift in zip(labels, shifts)])


class Classifier(nn.Module):
    """Its loss is in nats an image."""

    FACTORS = "classifier.*.weight"  # of the fully connected layers

    def __init__(self, features, classifier):
        super().__init__()
        self.features, self.classifier = nn.Sequential(*features), nn.Sequential(nn.Flatten(), *classifier)
        for module in self.features.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, batch):
        images, labels = batch
        return functional.cross_entropy(self.classifier(self.features(images)), labels)

    def judge(self, batch):
        """(loss, part of the images that it takes for others)"""
        images, labels = batch
        scores = self.classifier(self.features(images))
        return functional.cross_entropy(scores, labels).item(), (scores.argmax(1) != labels).float().mean().item()


def quick():
    """Caffe's cifar10_quick: 145,578 parameters."""
    return Classifier(
        [nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU(),
         nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True),
         nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True)],
        [nn.Linear(64 * 4 * 4, 64), nn.Linear(64, CLASSES)])


def alexnet():
    """Five convolutions, pooling after the first two and the last, three fully connected layers."""
    def convolution(before, after):
        return [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]

    return Classifier(
        [*convolution(3, 32), nn.MaxPool2d(2), *convolution(32, 64), nn.MaxPool2d(2), *convolution(64, 96),
         *convolution(96, 64), *convolution(64, 64), nn.MaxPool2d(2)],
        [nn.Linear(64 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)])


class Inception(nn.Module):
    """A module of GoogLeNet, with its four branches."""

    def __init__(self, before, ones, threes, fives, pooled):
        super().__init__()

        def branch(*layers):
            return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))

        self.branches = nn.ModuleList([
            branch(nn.Conv2d(before, ones, 1)),
            branch(nn.Conv2d(before, threes // 2, 1), nn.Conv2d(threes // 2, threes, 3, padding=1)),
            branch(nn.Conv2d(before, fives // 2, 1), nn.Conv2d(fives // 2, fives, 5, padding=2)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), branch(nn.Conv2d(before, pooled, 1)))])

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.branches], 1)


def googlenet():
    """A convolution, four modules with pooling between them, the mean of each channel, one fully connected layer."""
    return Classifier(
        [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), Inception(32, 16, 24, 8, 8),
         Inception(56, 24, 32, 8, 8), nn.MaxPool2d(2), Inception(72, 32, 48, 16, 16), Inception(112, 40, 56, 16, 16),
         nn.AdaptiveAvgPool2d(1)],
        [nn.Linear(128, CLASSES)])


MODELS = {"quick": quick, "alexnet": alexnet, "googlenet": googlenet}


class ImageTask:
    """What a rank trains, on which batches, and how good it is."""

    def __init__(self, arguments):
        self.images, self.make, self.number = Images(), MODELS[arguments.model], arguments.batch
        self.held_out = self.images.make(EVALUATED, HELD_OUT_SEED)
        self.factors = {Classifier.FACTORS: self.number}

    def model(self):
        return self.make()

    def batch(self, rank, ranks, step):
        return self.images.make(self.number, step * ranks + rank)

    def judge(self, model):
        return model.judge(self.held_out)
