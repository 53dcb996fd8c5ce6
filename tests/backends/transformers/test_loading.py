"""Loading: names are resolved as documented, and every mistake gets a short, useful message."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from patchkv_agents.backends.transformers.embedded import find_gguf
from patchkv_agents.backends.transformers.loading import load_model, load_tokenizer
from patchkv_agents.backends.transformers.quiet import quiet_transformers
from patchkv_agents.errors import InputError, ModelNotFoundError, UnsupportedModelError


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory, smollm2_tokenizer) -> Path:
    """A random model of the Llama family in bfloat16, with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=smollm2_tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=2,
    )
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        smollm2_tokenizer.save_pretrained(folder)
    return folder


def test_embedded_model_is_ready_for_inference(smollm2_model, smollm2_tokenizer) -> None:
    assert not smollm2_model.training
    assert not any(parameter.requires_grad for parameter in smollm2_model.parameters())
    assert smollm2_model.dtype == torch.float32
    assert smollm2_model.config.max_position_embeddings == smollm2_tokenizer.model_max_length


def test_loading_the_embedded_model_is_silent(capfd) -> None:
    load_model("smollm2", device="cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(None, torch.bfloat16), ("float32", torch.float32), (torch.float16, torch.float16)],
)
def test_local_folder(tiny_folder: Path, dtype, expected: torch.dtype) -> None:
    model, tokenizer = load_model(str(tiny_folder), dtype=dtype, device="cpu")
    assert model.dtype == expected
    assert model.device == torch.device("cpu")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer.encode("a  1") == load_tokenizer(str(tiny_folder)).encode("a  1")


# --- names that lead nowhere ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/such/folder", "~/none", "a/b/c", "", "two words"]
)
def test_name_that_is_neither_folder_nor_id(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder .* no model id.*'smollm2'"):
        load_model(name)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "smollm3"])
def test_id_without_network_names_both_mends(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"check the spelling and the network") as caught:
        load_tokenizer(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_id_that_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(name: str, timeout: float) -> None:
        assert timeout <= 5
        raise not_found

    not_found = huggingface_hub.errors.RepositoryNotFoundError.__new__(
        huggingface_hub.errors.RepositoryNotFoundError
    )
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    with pytest.raises(ModelNotFoundError, match=r"no model 'nobody/no-such-model'.*spelling"):
        load_model("nobody/no-such-model")


def test_id_on_this_machine_needs_no_hub(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in the local Transformers cache is used without asking the hub."""
    revision = "0" * 40
    repo = tmp_path / "models--me--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / revision).symlink_to(tiny_folder, target_is_directory=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "model_info", None)  # calling it would be a TypeError
    model, _ = load_model("me/tiny", device="cpu")
    assert model.config.num_hidden_layers == 2


# --- folders that hold no usable model -----------------------------------------------------------


def copy_without(source: Path, target: Path, *left_out: str) -> Path:
    target.mkdir()
    for file in source.iterdir():
        if file.name not in left_out:
            (target / file.name).write_bytes(file.read_bytes())
    return target


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="holds no model .no config.json"):
        load_model(str(tmp_path))


def test_tokenizer_alone(smollm2_tokenizer, tmp_path: Path) -> None:
    """Comparing contexts needs no weights."""
    smollm2_tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode("a  1") == smollm2_tokenizer.encode("a  1")
    with pytest.raises(UnsupportedModelError, match="config.json"):
        load_model(str(tmp_path))


def test_folder_without_weights(tiny_folder: Path, tmp_path: Path) -> None:
    folder = copy_without(tiny_folder, tmp_path / "model", "model.safetensors")
    with pytest.raises(ModelNotFoundError, match="It needs config.json"):
        load_model(str(folder))


def test_truncated_weights(tiny_folder: Path, tmp_path: Path) -> None:
    folder = copy_without(tiny_folder, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UnsupportedModelError, match="Check that its files are whole"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("config", "error", "reason"),
    [
        ("{", ModelNotFoundError, "not a valid JSON file"),
        ('{"model_type": "no_such_type"}', UnsupportedModelError, "model type `no_such_type`"),
    ],
)
def test_unusable_config(
    tiny_folder: Path, tmp_path: Path, capfd, config: str, error: type, reason: str
) -> None:
    folder = copy_without(tiny_folder, tmp_path / "model")
    (folder / "config.json").write_text(config)
    with pytest.raises(error, match=reason) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_model_of_another_kind(tiny_folder: Path, tmp_path: Path) -> None:
    folder = copy_without(tiny_folder, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(UnsupportedModelError, match="causal language model"):
        load_model(str(folder))


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float13", "nn", "__doc__"])
def test_unknown_dtype(dtype: str) -> None:
    with pytest.raises(InputError, match="unknown dtype"):
        load_model("smollm2", dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_unknown_device(device: str) -> None:
    with pytest.raises(InputError, match="device"):
        load_model("smollm2", device=device)


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu", "device_map": "auto"},
        {"max_memory": {"cpu": "1GiB"}},
        {"offload_folder": "away"},
        {"load_in_8bit": True},
    ],
    ids=str,
)
def test_options_that_do_not_go_together(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match="device_map|unknown options.*quantization_config"):
        load_model("smollm2", **options)


# --- GGUF ---------------------------------------------------------------------------------------


def test_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(ModelNotFoundError, match="a file, and not GGUF: give the model's folder"):
        load_model(str(tmp_path / "model.bin"))


def test_damaged_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF but no more than that")
    with pytest.raises(UnsupportedModelError, match="Check that its files are whole"):
        load_model(str(tmp_path / "model.gguf"))


@pytest.mark.slow
def test_gguf_file(smollm2_model, smollm2_tokenizer) -> None:
    """The embedded model as its package has it, without our conversion."""
    model, tokenizer = load_model(str(find_gguf()), device="cpu")
    for name, weight in smollm2_model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, msg=name)
    text = "The ferry leaves at 17:40.\n\nNaïve?"
    assert tokenizer(text)["input_ids"] == smollm2_tokenizer(text)["input_ids"]
    assert tokenizer.chat_template
