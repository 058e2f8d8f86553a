"""Compressed folders explain themselves: a note in the model card, and what transformers prints without the import."""

import copy
import json
import pickle
import re
import warnings

import pytest
import torch
import transformers
from commands import SMALL, python, run
from model_folders import make_bert, make_llama
from safetensors.torch import load_file
from tiny import compressed, logits, reloaded

from tensorbed.integrations.transformers import cards

IMPORT = "import tensorbed.integrations.transformers"
FRONT = "---\nlicense: mit\ntags:\n- words\n---\n"


def card_of(folder):
    return (folder / "README.md").read_text()


def lines_that_load(folder):
    (block,) = re.findall(r"```python\n(.*?)```", card_of(folder), re.DOTALL)
    return block


def test_the_lines_of_the_card_load_the_model(tmp_path):
    make_llama(tmp_path / "llama")
    run("compress", tmp_path / "llama", tmp_path / "small", "--format", "int8", *SMALL)
    assert lines_that_load(tmp_path / "small").count("\n") == 4
    script = f"{lines_that_load(tmp_path / 'small')}\nprint(type(model).__name__, model.lm_head)"
    result = python("-c", script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("LlamaForCausalLM Head(32, 320, tied, quantized_rows")
    for warning in ("Unknown quantization", "UNEXPECTED", "MISMATCH"):
        assert warning not in result.stderr


def test_the_card_says_what_the_model_is(tmp_path):
    model = compressed("llama", "quantized_rows")
    model.save_pretrained(tmp_path / "small")
    said = card_of(tmp_path / "small")
    assert said.startswith("<!-- tensorbed")
    layer, whole = model.model.embed_tokens, sum(p.nbytes for p in model.state_dict().values()) / 1e6
    assert f"kept {layer.compression_ratio:.1f} times smaller" in said
    assert f"`model.embed_tokens`, {layer.structure.summary}" in said
    assert "lm_head" not in said  # the same table
    assert 'pip install ".[transformers]"' in said
    assert f"{whole:.1f} MB" in said
    assert 'LlamaForCausalLM.from_pretrained("small")' in said


def test_a_folder_of_sentence_transformers_is_loaded_by_it(tmp_path):
    source = make_bert(tmp_path / "bert")
    (source / "README.md").write_text(f"{FRONT}# about the model\n")
    run("compress", source, tmp_path / "small", "--format", "int8", *SMALL)
    assert 'model = SentenceTransformer("small")' in lines_that_load(tmp_path / "small")
    said = card_of(tmp_path / "small")
    assert said.startswith(FRONT + "<!-- tensorbed")
    assert said.endswith("<!-- tensorbed: end -->\n\n# about the model\n")


@pytest.mark.parametrize(
    "front", [b"", FRONT.encode(), FRONT.replace("\n", "\r\n").encode(), b"\xef\xbb\xbf" + FRONT.encode()]
)
@pytest.mark.parametrize("rest", [b"", b"# title\r\n\r\ntext", "schön\n---\nnot the front\n".encode(), b"latin \xe4\n"])
def test_a_card_is_kept_below_the_note(tmp_path, front, rest):
    (tmp_path / "README.md").write_bytes(front + rest)
    for note in ("first", "second", "second"):
        text = f"{cards._BEGIN}\n{note}\n{cards._END}\n"
        cards.write_note(tmp_path, text)
        found = (tmp_path / "README.md").read_bytes()
        assert found == front + text.encode() + (b"\n" + rest if rest else b"")


@pytest.mark.parametrize("text", ["---\nno end of it\n", "----\nx\n---\n", " ---\nx\n---\n"])
def test_what_is_no_front_matter_is_below_too(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    cards.write_note(tmp_path, "note\n")
    assert card_of(tmp_path) == f"note\n\n{text.lstrip()}"


def test_front_matter_without_a_last_line_end(tmp_path):
    (tmp_path / "README.md").write_text(FRONT.rstrip())
    cards.write_note(tmp_path, "note\n")
    assert card_of(tmp_path) == f"{FRONT}note\n"


def test_a_card_that_is_no_file_stays(tmp_path):
    (tmp_path / "README.md").mkdir()
    compressed("llama", "quantized_rows").save_pretrained(tmp_path)
    assert (tmp_path / "README.md").is_dir()


def test_copies_and_parts_write_their_own_and_dense_models_none(tmp_path):
    model = compressed("llama", "quantized_rows")
    for name, one in (("copied", copy.deepcopy(model)), ("pickled", pickle.loads(pickle.dumps(model)))):
        one.save_pretrained(tmp_path / name)
        assert f'LlamaForCausalLM.from_pretrained("{name}")' in card_of(tmp_path / name)
    model.model.save_pretrained(tmp_path / "part")
    assert 'LlamaModel.from_pretrained("part")' in card_of(tmp_path / "part")
    again = reloaded(model, tmp_path / "saved")
    again.save_pretrained(tmp_path / "again", is_main_process=False)
    assert not (tmp_path / "again" / "README.md").exists()
    again.dequantize().save_pretrained(tmp_path / "dense")
    assert not (tmp_path / "dense" / "README.md").exists()


def test_names_in_a_card_do_not_end_its_quotes():
    model = compressed("llama", "quantized_rows")
    note = cards.note_on(model, 'a"b\n```', source="some/`name`\x1b")
    assert 'from_pretrained("a\\"b\\\\n```")' in note
    assert "It was made of `some/'name'\\x1b`." in note


# Each in a process that imports transformers, which takes seconds: a model with a tied head, and one of two parts.
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("llama", True),
        ("t5", True),
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("bert", True, marks=pytest.mark.slow),
        pytest.param("gpt2", True, marks=pytest.mark.slow),
    ],
)
def test_without_the_import_transformers_says_which_is_missing(tmp_path, name, tied):
    model = compressed(name, "quantized_rows", tied=tied)
    model.save_pretrained(tmp_path)
    script = f"import transformers; transformers.{type(model).__name__}.from_pretrained({str(tmp_path)!r})"
    result = python("-c", script)
    assert result.returncode != 0
    assert f"got tensorbed ({IMPORT} before loading)" in result.stderr
    (row,) = [line for line in result.stderr.splitlines() if f"[compressed: {IMPORT} before loading]" in line]
    assert "UNEXPECTED" in row
    assert result.stderr.count("Traceback") == 1
    assert "MISMATCH" in result.stderr


def test_folders_of_before_load_as_they_did(tmp_path):
    """Their config has the plain name of the method; the checksums are the same."""
    model = compressed("llama", "quantized_rows")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["quant_method"] = "tensorbed"
    path.write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_what_is_said_to_others_is_not_loaded(tmp_path):
    model = compressed("llama", "quantized_rows", tied=False)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    empty = {name for name, tensor in tensors.items() if not tensor.numel()}
    hint = f"model.embed_tokens.[compressed: {IMPORT} before loading]"
    assert empty == {"model.embed_tokens.weight", "lm_head.weight", hint}
    other = compressed("llama", "quantized_rows", tied=False)
    assert str(other.load_state_dict(tensors)) == "<All keys matched successfully>"
