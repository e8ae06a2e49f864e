"""`accmt check --against`: clean exports pass, and of faulty ones the first part that differs is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from accmt import merge_adapter
from accmt.cli.main import main
from tests.conversations import CHATML, LLAMA
from tests.served_models import END, change_weights, check, permute, save_trained, untie, write_setting

SAME = {"chat template": "same", "stop token": "same", "tokenizer": "same", "log-probabilities": "same"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save_both(*, tie: bool = False) -> None:
    """Save the trained model, and a faithful export."""
    save_trained(tie=tie)
    shutil.copytree("trained", "export")


def save_adapter() -> None:
    """Save a base model and an adapter around it, with the tokenizer."""
    tokenizer = save_trained("base")
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained("base"), lora).save_pretrained("adapter")
    tokenizer.save_pretrained("adapter")


def write_template(template: str, folder: str = "export") -> None:
    Path(folder, "chat_template.jinja").write_text(template)


def add_token(folder: str) -> None:
    """Give a tokenizer another token for something that is in the strings to compare."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["world"])
    tokenizer.save_pretrained(folder)


# ---- A folder of transformers


def test_a_faithful_folder_is_the_same(capsys):
    save_both()
    assert check(capsys, "merged", "export")[:2] == (0, SAME)


def test_a_merged_adapter_is_the_same(capsys):
    save_adapter()
    merge_adapter("adapter", "export")
    assert check(capsys, "merged", "export", model="adapter")[:2] == (0, SAME)


def test_half_precision_is_the_same_within_its_rounding(capsys):
    save_both()
    AutoModelForCausalLM.from_pretrained("export", dtype=torch.bfloat16).save_pretrained("export")
    code, states, _ = check(capsys, "merged", "export")
    assert (code, states) == (0, SAME)


FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "double BOS": (
        lambda: write_template("{{ bos_token }}" + LLAMA),
        "chat template: <s> begins a conversation 2 times",
    ),
    "wrong template": (
        lambda: write_template(CHATML),
        "chat template: <s> begins a conversation 0 times, in training 1",
    ),
    "other role": (
        lambda: write_template(LLAMA.replace("message.role }}", "message.role | upper }}")),
        "chat template: at token 2: trained '<s><|header|>user",
    ),
    "no template": (lambda: Path("export/chat_template.jinja").unlink(), "chat template: the export has none"),
    "missing EOS": (
        lambda: write_setting("export/generation_config.json", "eos_token_id", 1),
        "stop token: answers end with '<|eot|>' (token ",
    ),
    "tokenizer": (lambda: add_token("export"), "tokenizer: \"Hello, world! It's"),
    "untied head": (lambda: change_weights("export", untie), "weights: untied head: lm_head.weight"),
    "permuted": (
        lambda: change_weights("export", permute),
        "weights: permuted q and k: model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight",
    ),
    "matrix": (
        lambda: change_weights("export", lambda model: model.model.layers[1].mlp.up_proj.weight.mul_(2)),
        "weights: model.layers.1.mlp.up_proj.weight of 21 tensors differ",
    ),
    "norm": (
        lambda: change_weights("export", lambda model: model.model.layers[1].input_layernorm.weight.mul_(2)),
        "weights: model.layers.1.input_layernorm.weight",
    ),
    "setting": (
        lambda: write_setting("export/config.json", "rms_norm_eps", 0.5),
        "layer: all weights are the same, but hidden states differ from layer 0 on; settings that differ: rms_norm",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_part_that_differs_is_named(fault: str, capsys):
    plant, expected = FAULTS[fault]
    save_both(tie=fault == "untied head")
    plant()
    code, states, first = check(capsys, "merged", "export")
    assert code == 1, states
    assert first.startswith(expected), first


def test_a_base_model_in_place_of_the_merged_one_is_an_unmerged_adapter(capsys):
    save_adapter()
    code, states, first = check(capsys, "merged", "base", model="adapter")
    assert (code, states["log-probabilities"]) == (1, "differs")
    assert first.startswith("weights: unmerged adapter")


def test_answers_come_from_a_file(capsys):
    """The embedding of a token that only the file has was changed."""
    tokenizer = save_trained()
    shutil.copytree("trained", "export")
    (token,) = tokenizer.encode("Z", add_special_tokens=False)
    change_weights("export", lambda model: model.lm_head.weight[token].add_(30))
    messages = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "ZZZ"}]
    Path("rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    code, states, first = check(capsys, "merged", "export", "--data", "rows.jsonl")
    assert (code, states["log-probabilities"]) == (1, "differs")
    assert "lm_head.weight" in first


def test_lines_are_printed_and_end_with_what_to_do(capsys):
    save_both()
    assert main(["check", "trained", "--against", "merged", "export"]) == 0
    assert capsys.readouterr().out.startswith("chat template: same\nstop token: same: '<|eot|>'")
    write_setting("export/generation_config.json", "eos_token_id", 1)
    assert main(["check", "trained", "--against", "merged", "export"]) == 1
    assert "\nfirst difference: stop token\n  do: write to generation_config.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "export", "named"),
    [
        ("merged", "nowhere", "no such folder"),
        ("tflite", "export", "expected: merged, gguf, onnx, vllm"),
        ("vllm", "http://127.0.0.1:9", "check the URL"),
        ("gguf", "model.gguf", "pip install gguf"),
        ("onnx", "model.onnx", "pip install onnxruntime onnx"),
    ],
)
def test_what_cannot_be_compared_is_an_error(kind: str, export: str, named: str, capsys, monkeypatch):
    for package in ("gguf", "onnx", "onnxruntime"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    save_trained()
    for file in ("model.gguf", "model.onnx"):
        Path(file).touch()
    code, _, message = check(capsys, kind, export)
    assert code == 2
    assert named in message


def test_rows_without_an_export_are_an_error(capsys):
    assert main(["check", "checkpoints", "--data", "rows.jsonl"]) == 2
    assert "--against merged FOLDER" in capsys.readouterr().err


# ---- A server


@contextmanager
def serving(
    folder: str, *, adds_bos: bool = False, stops: list[int] | None = None, root: str = "far/away"
) -> Iterator[str]:
    """Serve a model by the endpoints of vLLM's server that the command uses; yield its URL.

    Source: vllm/entrypoints/openai/protocol.py, and serving_tokenization.py beside it.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    eos = model.generation_config.eos_token_id if stops is None else stops
    stops = eos if isinstance(eos, list) else [eos]

    def tokenize(body: dict[str, Any]) -> dict[str, Any]:
        if "messages" in body:
            asks = body.get("add_generation_prompt", True)
            text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=asks)
            tokens = tokenizer.encode(text, add_special_tokens=False)
            tokens = [tokenizer.bos_token_id] * adds_bos + tokens
        else:
            tokens = tokenizer.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
        return {"count": len(tokens), "max_model_len": 512, "tokens": tokens}

    def complete(body: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            log_probs = model(input_ids=torch.tensor([body["prompt"]])).logits[0].log_softmax(-1)
        rows: list[Any] = [None]
        for row, token in zip(log_probs, body["prompt"][1:], strict=False):
            listed = {token, *row.topk(body["prompt_logprobs"]).indices.tolist()}
            rows.append({str(one): {"logprob": row[one].item(), "rank": 1, "decoded_token": ""} for one in listed})
        return {"choices": [{"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": rows}]}

    def chat(body: dict[str, Any]) -> dict[str, Any]:
        tokens = tokenize(body)["tokens"]
        for number in range(body["max_tokens"]):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
            for token, bias in body.get("logit_bias", {}).items():
                logits[int(token)] += bias
            tokens.append(int(logits.argmax()))
            if tokens[-1] in stops:
                return {"choices": [{"index": number, "finish_reason": "stop"}]}
        return {"choices": [{"index": 0, "finish_reason": "length"}]}

    answers = {"/tokenize": tokenize, "/v1/completions": complete, "/v1/chat/completions": chat}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.answer({"object": "list", "data": [{"id": "chat", "root": root}]})

        def do_POST(self) -> None:  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(answers[self.path](body))

        def answer(self, content: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_faithful_server_is_the_same(capsys):
    save_trained()
    with serving("trained") as url:
        assert check(capsys, "vllm", url)[:2] == (0, SAME)
        assert check(capsys, "vllm", f"{url}/v1#chat")[:2] == (0, SAME)
        assert "one of chat" in check(capsys, "vllm", f"{url}#other")[2]


def test_faults_of_a_server_are_named(capsys):
    save_both()
    with serving("export", adds_bos=True) as url:
        assert check(capsys, "vllm", url)[2].startswith("chat template: <s> begins a conversation 2 times")
    with serving("export", stops=[1]) as url:
        assert check(capsys, "vllm", url)[2].startswith(f"stop token: answers end with {END!r}")
    write_template(CHATML)
    with serving("export") as url:
        assert check(capsys, "vllm", url)[2].startswith("chat template: <s> begins a conversation 0 times")


def test_weights_of_a_server_are_those_of_its_folder_if_it_is_on_this_machine(capsys):
    save_both()
    change_weights("export", permute)
    with serving("export", root=str(Path("export").absolute())) as url:
        assert check(capsys, "vllm", url)[2].startswith("weights: permuted q and k")
    with serving("export") as url:
        assert check(capsys, "vllm", url)[2].startswith("weights: they cannot be read from here")


def test_a_server_without_the_adapter_is_named(capsys):
    save_adapter()
    with serving("base") as url:
        assert check(capsys, "vllm", url, model="adapter")[2].startswith("weights: unmerged adapter")
