"""Datasets whose items are looked up in the worker; importable, because a spawned worker imports them."""

import torch
from torch.utils.data import Dataset


class Rows(Dataset):
    """Item ``k`` is what the layer gives for the ``k``-th batch of ids."""

    def __init__(self, layer, batches):
        self.layer, self.batches = layer, batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, k):
        with torch.no_grad():
            return self.layer(self.batches[k])


class Trained(Rows):
    """Item ``k`` is the gradient of the first core."""

    def __getitem__(self, k):
        first = next(iter(self.layer.parameters()))
        return torch.autograd.grad(self.layer(self.batches[k]).square().sum(), first)[0]


class Refused(Rows):
    """Item ``k`` is why the ids were refused. An error that leaves the worker ends it, and torch waits ten seconds."""

    def __getitem__(self, k):
        try:
            super().__getitem__(k)
        except IndexError as error:
            return str(error)
        return ""


class Collated(Rows):
    """Item ``k`` are the ids; ``collate`` looks up all of a batch."""

    def __getitem__(self, k):
        return self.batches[k]

    def collate(self, items):
        with torch.no_grad():
            return self.layer(torch.stack(items))
