"""Small models and batches that several programs of the corpus train on."""

import torch
from torch import nn

WIDTH = 16


class Block(nn.Module):
    """A residual block with two linear layers, as in a transformer's feed-forward part."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def perceptron(width=WIDTH):
    """Returns a model of three layers that maps `width` numbers to one."""
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def batches(count, rows=4, width=WIDTH):
    """Yields `count` batches of random inputs."""
    for _ in range(count):
        yield torch.randn(rows, width)
