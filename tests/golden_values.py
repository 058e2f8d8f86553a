"""What every sample computes, written down: ``python tests/golden_values.py FOLDER`` makes ``values.json`` there,
and ``states.safetensors``, the tensors of formats that round.

Only public names are used, so that the same lines run at any commit. Large tensors are told by their bytes' digest, by
their norm and by their product with a fixed vector.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from samples import SAMPLES

import tensorbed as tb

WORDS, VECTORS = 24, 5


def machine():
    """Draws have the same bits where this is the same."""
    return f"torch {torch.__version__.split('+')[0]}, {torch.backends.cpu.get_cpu_capability()}"


def told(tensor):
    flat = tensor.detach().double().reshape(-1)
    mixed = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) * 0.7)
    return [flat.norm().item(), (flat * mixed).sum().item()]


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def is_rounded(sample):
    """Whether tensors that differ in a last bit, as those of two machines may, can have another table."""
    return any(not spec.trainable for spec in sample.structure.tensors()) or sample.structure.kind == "straight_through"


def layer_of(kind, sample, state):
    layer = fresh_layer(kind, sample)
    if state:
        layer.load_state_dict(state)
    return layer


def fresh_layer(kind, sample):
    """Drawn with entries of size 1, or fitted to a drawn table where a format cannot be drawn."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    options = {"mode": "sum"} if kind is tb.EmbeddingBag else {}
    try:
        return kind(sample.rows, sample.cols, sample.format, std=1.0, **options)
    except (ValueError, TypeError):
        table = torch.randn(sample.rows, sample.cols, generator=generator)
        return kind.from_pretrained(table, sample.format, freeze=False, **options)


def computed(sample, state=None):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(2)
    index = torch.randint(0, sample.rows, (WORDS,), generator=generator)
    index[0], index[1], index[2] = 0, sample.rows - 1, index[3]
    hidden = torch.randn(VECTORS, sample.cols, generator=generator) / sample.cols**0.5
    embedding, bag = layer_of(tb.Embedding, sample, state), layer_of(tb.EmbeddingBag, sample, state)
    head = tb.Head.tied_to(embedding)
    weights = torch.randn(WORDS, generator=generator)
    offsets = torch.tensor([0, 3, 3, 9, 10, 20])
    scores, classes = head.topk(hidden, min(4, sample.rows))
    values = {
        "draw": {name: digest(tensor) for name, tensor in sorted(embedding.state_dict().items())},
        "drawn": {name: told(tensor) for name, tensor in sorted(embedding.state_dict().items())},
        "rows": told(embedding(index)),
        "bags": told(bag(index, offsets, weights)),
        "loss": head.loss(hidden, index[:VECTORS]).item(),
        "topk": {"scores": told(scores), "classes": classes.tolist()},
    }
    trained = {name: p for name, p in embedding.named_parameters() if p.requires_grad}
    if trained:
        hidden.requires_grad_()
        for name, made in (
            ("rows", embedding(index).square().sum()),
            ("loss", head.loss(hidden, index[:VECTORS], label_smoothing=0.1)),
        ):
            grads = torch.autograd.grad(made, [*trained.values()], allow_unused=True)
            values[f"gradients of {name}"] = {
                key: told(grad) for key, grad in zip(trained, grads, strict=True) if grad is not None
            }
        pooled = dict(bag.named_parameters())
        grads = torch.autograd.grad(bag(index, offsets, weights).square().sum(), [*pooled.values()], allow_unused=True)
        values["gradients of bags"] = {
            key: told(grad) for key, grad in zip(pooled, grads, strict=True) if grad is not None
        }
    return values


def main(folder):
    samples = [sample for samples in SAMPLES.values() for sample in samples]
    text = json.dumps(
        {"machine": machine(), "samples": {str(sample): computed(sample) for sample in samples}}, indent=1
    )
    (folder / "values.json").write_text(text + "\n")
    states = {sample: fresh_layer(tb.Embedding, sample).state_dict() for sample in samples if is_rounded(sample)}
    tensors = {f"{sample}/{name}": tensor for sample, state in states.items() for name, tensor in state.items()}
    save_file(tensors, folder / "states.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
