"""What serves a model: a folder of transformers, a GGUF file, an ONNX file, or a server."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accmt.addons.pretrained import load_pretrained
from accmt.errors import ArgumentError, ArgumentFileError, MissingPackageError, fail
from accmt.libraries.versions import require
from accmt.saving.weights import ADAPTER_CONFIG

CAUSAL = "AutoModelForCausalLM"
_COMMAND = "accmt check --against"

_LLAMA_STOPS = (
    *(
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "</s>",
    ),
    *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>"),
    *("<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
"""Tokens at which llama.cpp stops because of their text. Source: llama_vocab::impl::load in its src/llama-vocab.cpp."""

_PRE_TOKENIZERS_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
"""Pre-tokenizers for which llama.cpp adds a beginning-of-sequence token if the file does not say. Source: as above."""

Messages = Sequence[Mapping[str, str]]


class Target:
    """Base class of what serves a model.

    Attributes:
        adds_bos: Whether its runtime puts a beginning-of-sequence token before a rendered conversation.
        template_do: What to do if its chat template is wrong.
        stop_do: What to do if a stop token is missing; "{id}" and "{ids}" stand for the token and all stop tokens.
        tokenizer_do: What to do if its tokenizer is wrong.
    """

    adds_bos = False
    template_do = stop_do = tokenizer_do = ""

    @cached_property
    def dtype(self) -> str:
        """The data type of its weights: one of torch, or a quantization such as "Q4_K"."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def model(self) -> Any:
        """The model as one of transformers; None if there is none."""
        return None

    def chat_tokens(self, messages: Messages, *, asks: bool) -> list[int] | None:
        """Return the tokens of a conversation as the model gets them; None if it has no chat template.

        Args:
            messages: The conversation.
            asks: Whether the generation prompt is appended.
        """
        raise NotImplementedError

    def encode(self, text: str) -> list[int] | None:
        """Return the tokens of a text without those that a runtime adds; None if it has no tokenizer."""
        raise NotImplementedError

    def is_stop(self, token: int) -> bool | None:
        """Return whether generation ends at a token; None if that is not known."""
        raise NotImplementedError

    def log_probs(self, tokens: list[int]) -> Tensor:
        """Return log-probabilities of each token but the first: of the whole vocabulary, or only of the token.

        Shapes: [tokens - 1, vocabulary] or [tokens - 1].
        """
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens], device=self.model.device)).logits[0, :-1]
        log_probs: Tensor = logits.float().log_softmax(-1).cpu()
        return log_probs

    def find_vocabulary_fault(self, tokenizer: Any) -> str | None:
        """Return how its vocabulary differs from the trained tokenizer's, beyond the tokens of strings."""
        return None

    def tensors(self) -> Mapping[str, Tensor] | None:
        """Return its tensors by their names in transformers; None if they cannot be read."""
        return None if self.model is None else self.model.state_dict()


class Folder(Target):
    """A folder of transformers, or an adapter with its base model.

    Raises:
        ArgumentFileError: There is no such folder.
    """

    template_do = "save the trained tokenizer there: AutoTokenizer.from_pretrained(MODEL).save_pretrained(EXPORT)"
    tokenizer_do = template_do
    stop_do = 'write to generation_config.json of the export: "eos_token_id": {ids}'

    def __init__(self, path: Path) -> None:
        require("transformers", "accmt check --against")
        if not path.is_dir():
            do = "pass the folder that `accmt sft`, a Trainer or `save_pretrained` wrote"
            raise fail(ArgumentFileError, str(path), got="no such folder", expected="a model folder", do=do)
        self.path = path
        self.base = path
        if (path / ADAPTER_CONFIG).is_file():
            self.base = Path(json.loads((path / ADAPTER_CONFIG).read_text())["base_model_name_or_path"])

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer; for an adapter without one, that of its base model; None without either."""
        from transformers import AutoTokenizer

        for folder in (self.path, self.base):
            if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
                return AutoTokenizer.from_pretrained(folder)
        return None

    @cached_property
    def model(self) -> Any:
        """The model, with its adapter if it has one, on the accelerator if there is one."""
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        return load_pretrained(self.path, CAUSAL).eval().to(device)

    def chat_tokens(self, messages: Messages, *, asks: bool) -> list[int] | None:
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return None
        return self.encode(render(self.tokenizer, messages, asks=asks))

    def encode(self, text: str) -> list[int] | None:
        return None if self.tokenizer is None else self.tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def stops(self) -> list[int] | None:
        """The tokens at which `generate` stops."""
        for name in ("generation_config.json", "config.json"):
            for folder in (self.path, self.base):
                if (folder / name).is_file():
                    stops = json.loads((folder / name).read_text()).get("eos_token_id")
                    return stops if isinstance(stops, list) else [] if stops is None else [stops]
        return None

    def is_stop(self, token: int) -> bool | None:
        return None if self.stops is None else token in self.stops


class Onnx(Folder):
    """A causal model in an ONNX file, with what else is in its folder.

    Raises:
        ArgumentFileError: There is no such file.
        MissingPackageError: onnxruntime or onnx is not installed.
    """

    model = None

    def __init__(self, path: Path) -> None:
        self.file = _find_file(path, ".onnx")
        super().__init__(self.file.parent)
        runtime = _import("onnxruntime", "onnx", "onnxruntime onnx")
        self._graph = _import("onnx", "onnx", "onnxruntime onnx").load(self.file).graph
        self._session = runtime.InferenceSession(self.file, providers=["CPUExecutionProvider"])

    @cached_property
    def dtype(self) -> str:
        operators = {node.op_type for node in self._graph.node}
        if any("NBits" in name for name in operators):
            return "4-bit"
        if any("Quantize" in name or "Integer" in name for name in operators):
            return "8-bit"
        return {"tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16"}.get(
            self._session.get_outputs()[0].type, "float32"
        )

    def log_probs(self, tokens: list[int]) -> Tensor:
        import numpy as np

        length = len(tokens)
        inputs = {"input_ids": tokens, "attention_mask": [1] * length, "position_ids": list(range(length))}
        feeds: dict[str, Any] = {}
        for entry in self._session.get_inputs():
            if entry.name in inputs:
                feeds[entry.name] = np.array([inputs[entry.name]], np.int64)
            elif entry.type == "tensor(bool)":  # use_cache_branch
                feeds[entry.name] = np.array([False])
            else:  # past keys and values: none
                shape = [size if isinstance(size, int) else 0 for size in entry.shape]
                kind = np.float16 if entry.type == "tensor(float16)" else np.float32
                feeds[entry.name] = np.zeros([1, *shape[1:]], kind)
        names = [entry.name for entry in self._session.get_outputs()]
        logits = self._session.run(["logits" if "logits" in names else names[0]], feeds)[0]
        return torch.from_numpy(logits[0, :-1].astype(np.float32)).log_softmax(-1)

    def tensors(self) -> Mapping[str, Tensor] | None:
        to_array = import_module("onnx.numpy_helper").to_array
        folder = str(self.file.parent)
        return {entry.name: torch.tensor(to_array(entry, folder)) for entry in self._graph.initializer if entry.dims}


class Gguf(Target):
    """A GGUF file, run by llama.cpp if llama-cpp-python is installed, else by transformers.

    Args:
        path: The file, or a folder with one.
        trained: The trained model, whose tokenizer renders the file's template and, without llama.cpp, tokenizes.

    Raises:
        ArgumentFileError: There is no such file.
        MissingPackageError: gguf is not installed.
    """

    template_do = "gguf-new-metadata EXPORT NEW --chat-template-file MODEL/chat_template.jinja"
    stop_do = "gguf-set-metadata EXPORT tokenizer.ggml.eos_token_id {id}"
    tokenizer_do = "convert again, with the tokenizer files of the trained model beside its weights"

    def __init__(self, path: Path, trained: Folder) -> None:
        self.path = _find_file(path, ".gguf")
        self._trained = trained
        reader = _import("gguf", "gguf", "gguf").GGUFReader(self.path)
        self._fields = {name.removeprefix("tokenizer."): field.contents() for name, field in reader.fields.items()}
        kinds = {entry.tensor_type.name for entry in reader.tensors if len(entry.shape) > 1}
        self._kind: str = min(kinds, key=count_bits)
        self._texts: list[str] = self._fields.get("ggml.tokens", [])
        is_spm, pre = self._fields.get("ggml.model") == "llama", self._fields.get("ggml.pre")
        self.adds_bos = self._fields.get("ggml.add_bos_token", is_spm or pre in _PRE_TOKENIZERS_WITH_BOS)

    @property
    def dtype(self) -> str:
        floats = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        return floats.get(self._kind, self._kind)

    @cached_property
    def _llama(self) -> Any:
        if find_spec("llama_cpp") is None:
            return None
        return import_module("llama_cpp").Llama(
            str(self.path), n_ctx=4096, logits_all=True, verbose=False, n_gpu_layers=0
        )

    @cached_property
    def model(self) -> Any:
        """The model as transformers reads it from the file, in 32 bits."""
        import transformers

        kind = getattr(transformers, CAUSAL)
        return kind.from_pretrained(self.path.parent, gguf_file=self.path.name, dtype=torch.float32).eval()

    def chat_tokens(self, messages: Messages, *, asks: bool) -> list[int] | None:
        template, bos = self._fields.get("chat_template"), self._text_of("bos")
        if template is None:
            return None
        special = {"bos_token": bos, "eos_token": self._text_of("eos")}
        text = render(self._trained.tokenizer, messages, asks=asks, chat_template=template, **special)
        # Some runtimes add a second one. llama.cpp does not since 2025, and if the trained tokenizer has the same two
        # sources of it (as Llama 3's), the export is faithful.
        if self.adds_bos and bos and text.startswith(bos) and adds_bos(self._trained.tokenizer):
            text = text.removeprefix(bos)
        begin = [self._fields["ggml.bos_token_id"]] if self.adds_bos and bos else []
        return [*begin, *(self.encode(text) or ())]

    def _text_of(self, name: str) -> str:
        token = self._fields.get(f"ggml.{name}_token_id")
        return "" if token is None else self._texts[token]

    def encode(self, text: str) -> list[int] | None:
        if self._llama is not None:
            tokens: list[int] = self._llama.tokenize(text.encode(), add_bos=False, special=True)
            return tokens
        return self._trained.encode(text)

    def is_stop(self, token: int) -> bool | None:
        stops = [self._fields.get(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return token in stops or (token < len(self._texts) and self._texts[token] in _LLAMA_STOPS)

    def log_probs(self, tokens: list[int]) -> Tensor:
        if self._llama is None:
            return super().log_probs(tokens)
        self._llama.reset()
        self._llama.eval(tokens)
        return torch.from_numpy(self._llama.scores[: len(tokens) - 1].copy()).log_softmax(-1)

    def find_vocabulary_fault(self, tokenizer: Any) -> str | None:
        trained = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        for token, (text, served) in enumerate(zip(trained, self._texts, strict=False)):
            if text is not None and text != served:
                return f"token {token} is {served!r}, trained {text!r}"
        if len(self._texts) < len(trained):
            return f"{len(self._texts)} tokens, trained {len(trained)}"
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges")
        written = [" ".join(merge) if isinstance(merge, list) else merge for merge in merges or ()]
        if "ggml.merges" in self._fields and written != self._fields["ggml.merges"]:
            return "other merges"
        return None


class Server(Target):
    """An OpenAI-compatible server with vLLM's `/tokenize` and `prompt_logprobs`.

    Args:
        url: Its address, with or without `/v1`; `#name` at the end chooses one of several models.

    Raises:
        ArgumentError: It cannot be reached, or answers with an error.
    """

    template_do = "start the server with --chat-template MODEL/chat_template.jinja"
    stop_do = "start the server with --override-generation-config '{{\"eos_token_id\": {ids}}}'"
    tokenizer_do = "start the server with --tokenizer MODEL"
    dtype = "bfloat16"  # it does not say; its default for weights of 32 bits is 16

    def __init__(self, url: str) -> None:
        address, _, name = url.partition("#")
        self._url = address.rstrip("/").removesuffix("/v1")
        models = self._ask("/v1/models")["data"]
        chosen = [entry for entry in models if name in ("", entry["id"])]
        if not chosen:
            names = ", ".join(entry["id"] for entry in models)
            raise fail(ArgumentError, url, got=f"no model {name}", expected=f"one of {names}", do=f"{self._url}#NAME")
        self._name, root = chosen[0]["id"], chosen[0].get("root")
        self._folder = Folder(Path(root)) if root and Path(root).is_dir() else None

    @property
    def model(self) -> Any:
        """The model that the server loaded, if its folder is on this machine."""
        return self._folder and self._folder.model

    def chat_tokens(self, messages: Messages, *, asks: bool) -> list[int] | None:
        answer = self._ask("/tokenize", messages=list(messages), add_generation_prompt=asks)
        tokens: list[int] = answer["tokens"]
        return tokens

    def encode(self, text: str) -> list[int] | None:
        tokens: list[int] = self._ask("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
        return tokens

    def is_stop(self, token: int) -> bool | None:
        # The bias makes the server generate this token, whatever the model predicts.
        forced = {"logit_bias": {str(token): 100}, "max_tokens": 2, "temperature": 0}
        answer = self._ask("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], **forced)
        return bool(answer["choices"][0]["finish_reason"] == "stop")

    def log_probs(self, tokens: list[int]) -> Tensor:
        answer = self._ask("/v1/completions", prompt=tokens, max_tokens=1, temperature=0, prompt_logprobs=1)
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        return torch.tensor([row[str(token)]["logprob"] for token, row in zip(tokens[1:], rows, strict=True)])

    def _ask(self, path: str, **body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps({"model": self._name, **body}).encode() if body else None
        request = urllib.request.Request(f"{self._url}{path}", data, headers)  # noqa: S310 - the user's address
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
                return json.load(answer)
        except (OSError, ValueError) as error:
            why = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
            do = "check the URL, and the log of the server; a key is read from VLLM_API_KEY"
            expected = "a server that answers like vLLM"
            raise fail(ArgumentError, f"{self._url}{path}", got=f"{error} {why}", expected=expected, do=do) from error


def open_target(kind: str, export: str, trained: Folder) -> Target:
    """Return what serves a model.

    Args:
        kind: "gguf", "onnx", "merged" or "vllm".
        export: The path of a file or folder, or the URL of a server.
        trained: The trained model.

    Raises:
        ArgumentError: Another kind, or an export that cannot be opened.
        MissingPackageError: A package that reads it is not installed.
    """
    if kind == "vllm":
        return Server(export)
    if kind == "gguf":
        return Gguf(Path(export), trained)
    targets = {"merged": Folder, "onnx": Onnx}
    if kind not in targets:
        expected = "gguf, onnx, merged or vllm"
        raise fail(ArgumentError, _COMMAND, got=kind, expected=expected, do="--against merged FOLDER")
    return targets[kind](Path(export))


def render(tokenizer: Any, messages: Messages, *, asks: bool, **arguments: Any) -> str:
    """Return the text of a conversation."""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks, **arguments)
    return text


def adds_bos(tokenizer: Any) -> bool:
    """Return whether a tokenizer itself begins every text with a beginning-of-sequence token."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("a")[:1] == [bos]


def count_bits(dtype: str) -> int:
    """Return the number of bits of a data type: "bfloat16" has 16, "Q4_K" has 4."""
    numbers = re.findall(r"\d+", dtype)
    return int(numbers[0])


def _find_file(path: Path, suffix: str) -> Path:
    files = sorted(path.glob(f"*{suffix}")) if path.is_dir() else [path]
    if len(files) != 1 or not files[0].is_file():
        got = f"{len(files)} files {suffix}" if path.is_dir() else "no such file"
        do = f"pass the path of one file {suffix}"
        raise fail(ArgumentFileError, str(path), got=got, expected=f"a file {suffix}", do=do)
    return files[0]


def _import(name: str, kind: str, packages: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        do = f"pip install {packages}"
        where = f"{_COMMAND} {kind}"
        raise fail(MissingPackageError, where, got=f"{name}: {error}", expected=packages, do=do) from error
