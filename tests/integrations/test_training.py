"""Compressed models in training: Trainer, PEFT, checkpointing, and the loss without logits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import FORMATS, ROWS, compressed, dense, ids, logits, reloaded

import tensorbed as tb
from tensorbed.integrations.transformers import loss_without_logits

LABELS = ids().masked_fill(ids() % 7 == 0, -100)


def gradients(model, **batch):
    model.zero_grad()
    output = model(input_ids=ids(), labels=LABELS, **batch)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def still(model):
    """In training, without chance."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_rate", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def test_generate():
    model = compressed("llama", "product_quantized")
    found = model.generate(ids(), max_new_tokens=4, do_sample=False, pad_token_id=0)
    step = torch.cat([ids(), logits(model)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found[:, : step.shape[1]], step)


def test_gradients_of_tied_ends_add_up():
    model = compressed("llama", "low_rank")
    _, found = gradients(model)
    plain = dense()
    with torch.no_grad():
        plain.lm_head.weight.copy_(model.lm_head.weight)
    _, expected = gradients(plain)
    of_table = expected["model.embed_tokens.weight"]
    torch.testing.assert_close(found["model.embed_tokens.u"], of_table @ model.lm_head.v.detach(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("format", ["tensor_train", "product_quantized"])
def test_trainer(format, tmp_path):
    model = compressed("llama", format)
    data = [{"input_ids": row, "labels": row} for row in ids(shape=(8, 7))]
    before = model(ids(shape=(8, 7)), labels=ids(shape=(8, 7))).loss.item()
    arguments = transformers.TrainingArguments(
        tmp_path / "runs",
        per_device_train_batch_size=4,
        num_train_epochs=4,
        learning_rate=0.05,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=True,
        save_strategy="epoch",
        logging_strategy="no",
    )
    transformers.Trainer(model, arguments, train_dataset=data).train()
    model.eval()
    assert model(ids(shape=(8, 7)), labels=ids(shape=(8, 7))).loss.item() < before - 0.5
    saved = type(model).from_pretrained(next(tmp_path.glob("runs/checkpoint-8")))
    assert torch.equal(logits(saved), logits(model))


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    model = compressed("llama", "product_quantized")
    before = logits(model)
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    )
    assert not tuned.base_model.model.lm_head.codebooks.requires_grad
    output = tuned(input_ids=ids(), labels=LABELS)
    output.loss.backward()
    changed = logits(tuned)
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(compressed("llama", "product_quantized"), tmp_path)
    assert torch.equal(logits(again), changed)
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(logits(merged), changed, rtol=1e-4, atol=1e-5)
    assert not torch.equal(changed, before)
    assert merged.lm_head.codebooks is merged.model.embed_tokens.codebooks
    assert torch.equal(logits(reloaded(merged, tmp_path / "merged")), logits(merged))


def test_modules_to_save(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], r=2)
    tuned = peft.get_peft_model(compressed("llama", "product_quantized", tied=False), config)
    trained = [name for name, p in tuned.named_parameters() if p.requires_grad and "lora" not in name]
    assert sorted(name.split(".")[-4] for name in trained) == ["embed_tokens", "lm_head"]
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], 0.5)
    tuned(input_ids=ids(), labels=LABELS).loss.backward()
    optimizer.step()
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(compressed("llama", "product_quantized", tied=False), tmp_path)
    assert torch.equal(logits(again), logits(tuned))
    assert not torch.equal(logits(again), logits(compressed("llama", "product_quantized", tied=False)))


def test_bfloat16_and_checkpointing():
    model = still(compressed("llama", "tensor_train").bfloat16())
    plain, expected = gradients(model)
    model.gradient_checkpointing_enable()
    output, found = gradients(model)
    assert torch.equal(output.loss, plain.loss)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert", "opt", "gemma2", "bart"])
def test_loss_without_logits(name, monkeypatch):
    model = still(compressed(name, "tensor_train"))
    plain, expected = gradients(model)
    loss_without_logits(model)
    calls = []
    loss = tb.Head.loss
    monkeypatch.setattr(tb.Head, "loss", lambda *args, **options: calls.append(1) or loss(*args, **options))
    output, found = gradients(model)
    # A softcap, and a bias that is added outside of the head, want the logits.
    assert len(calls) == (0 if name in ("gemma2", "bart") else 1)
    torch.testing.assert_close(output.loss, plain.loss, rtol=1e-6, atol=1e-6)
    assert found.keys() == expected.keys()
    for key, grad in expected.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-4, atol=1e-6, msg=key)
    torch.testing.assert_close(output.logits.detach() + 0, plain.logits.detach())


def test_lazy_logits_in_half_precision_have_a_single_precision_loss():
    model = still(compressed("llama", "tensor_train").bfloat16())
    plain, _ = gradients(model)
    loss_without_logits(model)
    output, _ = gradients(model)
    assert output.loss.dtype == plain.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, plain.loss, rtol=1e-3, atol=1e-3)


def test_lazy_logits_only_where_asked_for(tmp_path):
    model = loss_without_logits(compressed("llama", "tensor_train"))
    assert type(model(ids()).logits) is torch.Tensor  # not training
    model.train()
    assert type(model(ids()).logits) is not torch.Tensor
    with torch.no_grad():
        assert type(model(ids()).logits) is torch.Tensor
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.lm_head.forward.args[0] is again.lm_head
    assert type(reloaded(model, tmp_path).train()(ids()).logits) is torch.Tensor
    assert type(loss_without_logits(model, False)(ids()).logits) is torch.Tensor
    with pytest.raises(ValueError, match="no head"):
        loss_without_logits(dense())


def test_everything_else_makes_the_logits():
    model = loss_without_logits(still(compressed("llama", "tensor_train")))
    with torch.no_grad():
        expected = model(ids()).logits
    lazy = model(ids()).logits
    assert lazy.shape == expected.shape
    target = ids().reshape(-1)
    for found, wanted in (
        (lazy[:, 2], expected[:, 2]),
        (lazy[:, -1, :], expected[:, -1, :]),
        (lazy[..., :-1, :], expected[..., :-1, :]),
        (lazy[..., 5], expected[..., 5]),
        (lazy[:, :, 3:9], expected[:, :, 3:9]),
        (lazy[0, 1, 2], expected[0, 1, 2]),
        (lazy[:, 3:5, 0:10, ...], expected[:, 3:5, 0:10, ...]),
        (lazy[..., 2:4, :], expected[..., 2:4, :]),
        (lazy[0, ..., 3:9], expected[0, ..., 3:9]),
        (lazy[0], expected[0]),
        (lazy[...], expected),
        (lazy[:, [1, 2]], expected[:, [1, 2]]),
        (lazy[lazy > 0], expected[expected > 0]),
        (lazy.reshape(shape=(14, ROWS)), expected.reshape(14, ROWS)),
        (lazy.view(torch.int32), expected.view(torch.int32)),
        (lazy.view(-1, ROWS), expected.view(-1, ROWS)),
        (lazy.view(-1), expected.view(-1)),
        (lazy.reshape(14, -1), expected.reshape(14, -1)),
        (lazy.reshape(ROWS, 14), expected.reshape(ROWS, 14)),
        (lazy.double(), expected.double()),
        (lazy.to(torch.float64), expected.to(torch.float64)),
        (lazy.to(torch.int64), expected.to(torch.int64)),
        (lazy.softmax(-1), expected.softmax(-1)),
        (lazy / 2, expected / 2),
        (torch.cat([lazy, lazy]), torch.cat([expected, expected])),
        (lazy.transpose(1, 2), expected.transpose(1, 2)),
        (F.cross_entropy(lazy.transpose(1, 2), ids()), F.cross_entropy(expected.transpose(1, 2), ids())),
        (F.cross_entropy(lazy.view(-1, ROWS), target), F.cross_entropy(expected.view(-1, ROWS), target)),
        (
            F.cross_entropy(lazy.view(-1, ROWS), target, label_smoothing=0.1, reduction="none"),
            F.cross_entropy(expected.view(-1, ROWS), target, label_smoothing=0.1, reduction="none"),
        ),
        (
            F.cross_entropy(lazy.view(-1, ROWS), expected.softmax(-1).view(-1, ROWS)),
            F.cross_entropy(expected.view(-1, ROWS), expected.softmax(-1).view(-1, ROWS)),
        ),
    ):
        torch.testing.assert_close(found + 0, wanted + 0, rtol=1e-5, atol=1e-6)


def test_compress_for_training_from_scratch(tmp_path):
    model = dense()
    tb.compress_(model, FORMATS["tensor_train"], min_rows=ROWS, fit=False)
    again = reloaded(model, tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert all(p.requires_grad for p in again.parameters())


def test_logits_that_are_written_to_are_what_the_loss_sees():
    model = still(compressed("llama", "tensor_train"))
    target = ids().reshape(-1)

    def masked():
        found = model(ids()).logits
        found[..., :100] = -1e9
        found.mul_(0.5)
        return F.cross_entropy(found.view(-1, ROWS), target.clamp_min(150))

    expected = masked()
    (wanted,) = torch.autograd.grad(expected, model.lm_head.core_0)
    loss_without_logits(model)
    found = masked()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, model.lm_head.core_0)[0], wanted)


def test_logits_are_kept_once_they_are_made():
    model = loss_without_logits(still(compressed("llama", "tensor_train")))
    lazy = model(ids()).logits
    before = lazy + 0
    with torch.no_grad():
        model.lm_head.core_0.zero_()
    assert torch.equal(lazy + 0, before)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_lazy_logits_remember_autocast(name):
    model = still(compressed(name, "tensor_train"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(ids(), labels=LABELS)
        loss_without_logits(model)
        output = model(ids(), labels=LABELS)
    assert output.logits.dtype == plain.logits.dtype
    torch.testing.assert_close(output.logits.detach() + 0, plain.logits.detach() + 0, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(output.loss.float(), plain.loss.float(), rtol=1e-2, atol=1e-2)
    output.loss.backward()


def test_lazy_logits_move():
    model = loss_without_logits(still(compressed("llama", "tensor_train")))
    lazy = model(ids()).logits
    assert lazy.to(device="meta").is_meta
    assert lazy.to("meta").is_meta
    assert lazy.to("cpu", torch.float64).dtype == torch.float64
