"""`accmt check --against` with files of GGUF and ONNX; `make served` runs it.

Where llama-cpp-python is installed, it runs the GGUF files, else transformers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from accmt import merge_adapter
from tests.conversations import CHATML
from tests.served_models import check, permute, permute_rows, save_trained, untie

SAME = {"chat template": "same", "stop token": "same", "tokenizer": "same", "log-probabilities": "same"}

pytestmark = pytest.mark.filterwarnings("default")  # of exporters


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(folder: str = "trained", change: Any = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        if change is not None:
            change(model)
    return model


# ---- GGUF

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Any, *, template: str | None = None, kind: str = "F32", **settings: Any) -> None:
    """Write a Llama model and its tokenizer as convert_hf_to_gguf.py of llama.cpp does.

    Args:
        model: The model.
        template: The chat template; None writes that of the tokenizer.
        kind: The type of matrices.
        **settings: What the file says of tokens: `add_bos`, `eos`.
    """
    import gguf

    tokenizer, config = AutoTokenizer.from_pretrained("trained"), model.config
    writer = gguf.GGUFWriter("model.gguf", "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    words = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    special = tokenizer.added_tokens_decoder
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in range(len(tokenizer))])
    writer.add_token_merges([" ".join(merge) for merge in words["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(settings.get("eos", config.eos_token_id))
    writer.add_add_bos_token(settings.get("add_bos", False))
    writer.add_chat_template(template or tokenizer.chat_template)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    matrices = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        place = name.removesuffix(".weight")
        if name.startswith("model.layers."):
            _, _, number, part = place.split(".", 3)
            place = f"blk.{number}.{_NAMES[part]}"
            if part[-6:] in heads:
                tensor = permute_rows(tensor, heads[part[-6:]])
        place = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}.get(place, place)
        if place == "output" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if tensor.dim() == 2 and kind != "F32":
            writer.add_tensor(f"{place}.weight", gguf.quants.quantize(array, matrices), raw_dtype=matrices)
        else:
            writer.add_tensor(f"{place}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_a_faithful_gguf_is_the_same(kind: str, capsys):
    save_trained()
    write_gguf(load(), kind=kind)
    code, states, first = check(capsys, "gguf", "model.gguf")
    assert (code, states) == (0, SAME), first


def unpermute(model: Any) -> None:
    """Order the rows of queries and keys so that GGUF's own permutation cancels: a conversion without it."""
    for layer in model.model.layers:
        for part, heads in ((layer.self_attn.q_proj, 4), (layer.self_attn.k_proj, 2)):
            halves = part.weight.reshape(heads, -1, 2, part.weight.shape[1]).transpose(1, 2)
            part.weight.copy_(halves.reshape(part.weight.shape))


GGUF_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "double BOS": ({"add_bos": True}, "chat template: <s> begins a conversation 2 times, in training 1"),
    "wrong template": ({"template": "{{ bos_token }}" + CHATML}, "chat template: at token 1: trained '<s><|header|>"),
    "missing EOS": ({"eos": 0}, "stop token: answers end with '<|eot|>'"),
    "untied head": ({"change": untie}, "weights: untied head"),
    "permuted": ({"change": unpermute}, "weights: permuted q and k: model.layers.0.self_attn.q_proj"),
    "permuted twice": ({"change": permute}, "weights: permuted q and k: model.layers.0.self_attn.q_proj"),
    "permuted and quantized": ({"change": permute, "kind": "Q8_0"}, "weights: permuted q and k"),
}


@pytest.mark.parametrize("fault", GGUF_FAULTS)
def test_the_fault_of_a_gguf_is_named(fault: str, capsys):
    settings, expected = GGUF_FAULTS[fault]
    save_trained(tie=fault == "untied head")
    write_gguf(load(change=settings.get("change")), **{name: settings[name] for name in settings if name != "change"})
    code, states, first = check(capsys, "gguf", "model.gguf")
    assert code == 1, states
    assert first.startswith(expected), first


def save_adapter() -> None:
    tokenizer = save_trained()
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(load(), lora).save_pretrained("adapter")
    tokenizer.save_pretrained("adapter")
    merge_adapter("adapter", "merged")


def test_an_unmerged_adapter_in_a_gguf_is_named(capsys):
    save_adapter()
    write_gguf(load("merged"))
    assert check(capsys, "gguf", "model.gguf", model="adapter")[0] == 0
    write_gguf(load())
    assert check(capsys, "gguf", "model.gguf", model="adapter")[2].startswith("weights: unmerged adapter")


def test_bos_that_the_trained_tokenizer_adds_as_well_is_no_fault(capsys):
    """As with Llama 3: llama.cpp then adds it once."""
    tokenizer = save_trained(adds_bos=True)
    write_gguf(load(), add_bos=True)
    code, states, first = check(capsys, "gguf", "model.gguf")
    assert (code, states) == (0, SAME), first
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_llama_cpp_splits_the_words_of_another_pre_tokenizer_otherwise(capsys, monkeypatch):
    import gguf

    monkeypatch.setattr(
        gguf.GGUFWriter, "add_tokenizer_pre", lambda self, _: self.add_string("tokenizer.ggml.pre", "qwen2")
    )
    save_trained()
    write_gguf(load())
    assert check(capsys, "gguf", "model.gguf")[2].startswith("tokenizer: ")


# ---- vLLM: tests/unit/test_addons_served.py has a double of its server


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_a_faithful_server_of_vllm_is_the_same(capsys):
    save_trained()
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--max-model-len", "512", "--enforce-eager"]
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "trained", *options]
    )
    try:
        while server.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models"):
                break
            time.sleep(1)
        code, states, first = check(capsys, "vllm", f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait()
    assert (code, states) == (0, SAME), first


# ---- ONNX


class Logits(torch.nn.Module):
    """Returns logits only, as exported models do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits


def write_onnx(model: Any) -> None:
    """Export a model beside the files of the trained one."""
    shutil.copytree("trained", "export", ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    ids = torch.arange(12).view(2, 6)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    shapes = {"input_ids": sizes, "attention_mask": sizes}
    settings = {"input_names": list(shapes), "output_names": ["logits"], "dynamic_shapes": shapes, "dynamo": True}
    inputs = (ids, torch.ones_like(ids))
    torch.onnx.export(Logits(model).eval(), inputs, "export/model.onnx", verbose=False, **settings)


def test_a_faithful_onnx_file_is_the_same(capsys):
    save_adapter()
    write_onnx(load("merged"))
    code, states, first = check(capsys, "onnx", "export/model.onnx", model="adapter")
    assert (code, states) == (0, SAME), first


@pytest.mark.parametrize(
    ("change", "expected"), [(untie, "weights: untied head"), (permute, "weights: permuted q and k")]
)
def test_the_fault_of_an_onnx_file_is_named(change: Any, expected: str, capsys):
    save_trained(tie=change is untie)
    write_onnx(load(change=change))
    code, states, first = check(capsys, "onnx", "export")
    assert (code, states["log-probabilities"]) == (1, "differs")
    assert first.startswith(expected), first
