"""Translators small enough for tests, and sentences for them."""

import torch

from experiments.lab.rows import configured
from experiments.lab.task import find
from experiments.tasks.translation.model import END, PAD, Translator

TASK = find("translation")
SIZE = {"vocabulary": 280, "dim": 8, "layers": 1, "heads": 2, "inner": 16, "dropout": 0.0, "positions": 40}
SIZE |= {"batch": 120, "steps": 6, "validations": 2, "precision": "fp32"}
FULL = {"format": "full"}
TRAIN = {"format": "tt", "ratio": 4.0}


def settings(dataset="multi30k", **options):
    return configured(TASK, f"{dataset}-full", {**SIZE, **options})


def model_of(vocabulary=30, **options):
    torch.manual_seed(0)
    return Translator(settings(**options), vocabulary).eval()


def padded(*sentences):
    longest = max(map(len, sentences))
    return torch.tensor([[*words, END] + [PAD] * (longest - len(words)) for words in sentences])


SOURCE, TARGET = padded([3, 4, 5], [6, 7, 8, 9, 10], [2]), padded([11, 12], [13], [14, 15, 16, 17])
