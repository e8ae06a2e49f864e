"""Hides secrets in everything that leaves memory: files, rows of trackers, messages and errors.

A secret is recognized by its key, by its format (a password in a URL, a service's token), or by its value: values with
a secret's name in the environment, on the command line or in the settings. Training gets the actual value; only
written or printed text passes through here.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
"""The replacement for a secret."""

_SHORTEST_VALUE = 8  # a shorter one is too likely to be an ordinary word, which would be hidden everywhere

_INSIDE = (
    *("password", "passwd", "passphrase", "passcode", "sshpass", "credential", "connectionstring", "apikey"),
    *("secretkey", "accesskey", "privatekey", "authtoken", "accesstoken", "bearertoken"),
)
"""A name that contains one of these, with its words joined, belongs to a secret."""

_WORDS = frozenset({"secret", "secrets", "pwd", "pw", "creds", "authorization", "bearer", "jwt"})
"""A name with one of these words belongs to a secret."""

_LAST_WORDS = frozenset({"auth", "token", "key", "pass", "header", "headers", "cookie", "cookies"})
"""A name that ends with one of these belongs to a secret; `token_type` and `key_padding` do not."""

_OF_PLACES = frozenset({"dir", "file", "folder", "length", "path", "type"})
"""A name that ends with one of these only describes a secret: `key_file`."""

_BEFORE_DATA = """
    additional assistant audio backward batch begin bos by cache chosen class cls column content data decoder each end
    eos eot every experiment feature features field first foreign forced forward group image index input instruction
    item join label labels lang language last level loss map mask max memory message messages metric min monitor multi
    n name next num number of output pad padding per placeholder position prefix primary prompt query record reference
    rejected response result return row sample second sep separator single sort source special split src start state
    step stop suffix system table target task text tgt think tool total unk use value video vision vocab word
"""
_OF_DATA = frozenset(_BEFORE_DATA.split())
"""Words that mark a following `token`, `key` or `pass` as data: `label_key`, `pad_token`, `forward_pass`."""

_COLLECTIONS = (Mapping, list, tuple, set, frozenset)
_SHORT_FLAG = re.compile(r"-[A-Za-z]")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_IN_URL = re.compile(
    r"""\b([a-z][a-z\d+.-]*://)(?:"""
    r"""[^\s/?#"'<>@:]*:(?!\d{1,5}(?:[/?#,;)\s"']|$))[^\s"'<>]*"""  # user:password, not host:port
    r"""|[^\s/?#"'<>]+)@""",
    re.IGNORECASE,
)
_PARAMETER = re.compile(r"""([?&#;])([^\s=&#?;"'<>]{1,80})=([^\s&#;"'<>]+)""")
_PEM = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)")
_TOKENS = re.compile(
    r"(?<![\w-])(?:"
    r"hf_(?=\w*[A-Z\d])[A-Za-z\d]{16,}"  # Hugging Face
    r"|gh[opsur]_[A-Za-z\d]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-(?=[\w-]*\d)[\w-]{16,}|[sr]k_(?:live|test)_\w{10,}"  # OpenAI, Anthropic; Stripe
    r"|(?:AKIA|ASIA)[A-Z\d]{16}"  # AWS
    r"|AIza[\w-]{30,}|ya29\.[\w-]{16,}|xox[a-z]-[\w-]{10,}"  # Google, Slack
    r"|npm_[A-Za-z\d]{30,}|pypi-[\w-]{30,}|nvapi-[\w-]{20,}|dapi[\da-f]{32}|gsk_[A-Za-z\d]{20,}|r8_[A-Za-z\d]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)*"  # a JSON web token
    r")"
)

_remembered: set[str] = set()


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a key, flag or variable with this name contains a secret.

    Compares words, not letters: `hub_token`, `apiKey` and `X-Api-Key` do, `tokenizer`, `max_tokens` and `monkey` do
    not.
    """
    words = [part.lower() for part in _PART.findall(name)]
    if not words or words[-1] in _OF_PLACES:
        return False
    if _is_surely_secret(words):
        return True
    if words[-1] not in _LAST_WORDS:
        return False
    return words[-1] not in ("token", "key", "pass") or _OF_DATA.isdisjoint(words[:-1])


def hide(value: Any, *, leave_out: bool = False) -> Any:
    """Return a value for writing: with `HIDDEN` in place of each secret, at any depth.

    Args:
        leave_out: Whether to omit entries with a secret instead, for a file that is read again.
    """
    return _hide(value, _known(), leave_out=leave_out)


def hide_text(text: str) -> str:
    """Return text with `HIDDEN` in place of each secret."""
    return _hide_text(text, _known())


def remember(value: Any) -> None:
    """Hide from now on, in all text, the secrets in settings: a library's error may repeat them."""
    _remembered.update(secret for secret in _find(value, is_secret=False) if len(secret) >= _SHORTEST_VALUE)


def write_command(command: Sequence[str]) -> str:
    """Return a program and its arguments as a shell command, with `...` in place of each secret."""
    return shlex.join(argument.replace(HIDDEN, "...") for argument in hide_in_command(command))


def hide_in_command(command: Sequence[str]) -> list[str]:
    """Return a program and its arguments with `HIDDEN` in place of each secret.

    The value of a flag of one letter, as in `-p VALUE` and `-pVALUE`, may be a password whatever the program is.
    """
    hidden, is_value = [], False
    for argument, secret in _find_in_command(command):
        if _SHORT_FLAG.match(argument):
            hidden.append(argument[:2] + HIDDEN * (len(argument) > 2))
        elif is_value and not argument.startswith("--"):  # `-v --epochs 3`: the first is a switch
            hidden.append(HIDDEN)
        else:
            hidden.append(argument.replace(secret, HIDDEN) if secret else hide_text(argument))
        is_value = _SHORT_FLAG.match(argument) is not None
    return hidden


def is_secret(name: str, value: Any) -> bool:
    """Return whether an attribute or entry is text with a secret's name, or a collection with text in it.

    Tensors and numbers are none: attention has a `key`, and a dict of counts may have any word as its key.
    """
    # In this order: the names of thousands of numbers are not looked at, and neither are long lists with other names.
    return isinstance(value, (str, bytes, *_COLLECTIONS)) and is_secret_name(name) and _has_text(value)


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, _COLLECTIONS):
        return any(map(_has_text, value))
    return isinstance(value, str | bytes)


def _is_surely_secret(words: Sequence[str]) -> bool:
    written = "".join(words)
    return any(known in written for known in _INSIDE) or not _WORDS.isdisjoint(words)


def _hide(value: Any, known: Sequence[str], *, leave_out: bool) -> Any:
    if isinstance(value, str):
        return _hide_text(value, known)
    if isinstance(value, Mapping):
        hidden: dict[Any, Any] = {}
        for key, item in value.items():
            is_secret = isinstance(key, str) and _is_secret(key, item)
            if not (leave_out and (is_secret or _changes(item, known))):
                key = _hide_text(key, known) if isinstance(key, str) else key
                hidden[key] = HIDDEN if is_secret else _hide(item, known, leave_out=leave_out)
        return hidden
    if type(value) in (list, tuple, set, frozenset):
        items = [item for item in value if not (leave_out and _changes(item, known))]
        return type(value)(_hide(item, known, leave_out=leave_out) for item in items)
    return value


def _changes(value: Any, known: Sequence[str]) -> bool:
    return isinstance(value, str) and _hide_text(value, known) != value


def _is_secret(key: str, value: Any) -> bool:
    """Return whether an entry is a secret: `token: true` and `header: 0` are not; `password: 1234` is."""
    if value is None or isinstance(value, bool):
        return False
    names = [part for part in key.split(".") if is_secret_name(part)]  # for flat keys, such as `model.token`
    if isinstance(value, int | float):
        return any(_is_surely_secret([part.lower() for part in _PART.findall(name)]) for name in names)
    return bool(names)


def _hide_text(text: str, known: Sequence[str]) -> str:
    for secret in known:
        text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _IN_URL.sub(_hide_user, text)
    if "PRIVATE KEY" in text:
        text = _PEM.sub(rf"\1{HIDDEN}\2", text)
    if "=" in text:
        text = _PARAMETER.sub(_hide_parameter, text)
    return _TOKENS.sub(HIDDEN, text)


def _hide_user(match: re.Match[str]) -> str:
    user = match[0].removeprefix(match[1])
    is_name = ":" not in user and len(user) < 20 and not match[1].lower().startswith("http")  # ssh://git@host
    return match[0] if is_name else f"{match[1]}{HIDDEN}@"


def _hide_parameter(match: re.Match[str]) -> str:
    name = unquote(match[2])
    is_secret = is_secret_name(name) or name.lower().endswith(("sig", "signature"))  # grants access to the URL
    return f"{match[1]}{match[2]}={HIDDEN}" if is_secret else match[0]


def _known() -> list[str]:
    """Return the secrets with known values, longest first: one may be a prefix of another."""
    values = {value for name, value in os.environ.items() if _may_hold_secret(name)}
    values = {value for value in values if len(value) >= _SHORTEST_VALUE}
    # Some variables only contain the location of a secret, such as SSH_AUTH_SOCK.
    values -= {value for value in values if value.startswith(("/", "~")) and _exists(value)}
    return sorted(values | _remembered | _secrets_of_command(tuple(sys.argv)), key=len, reverse=True)


@lru_cache(maxsize=4096)
def _may_hold_secret(variable: str) -> bool:
    return variable not in ("PWD", "OLDPWD") and is_secret_name(variable)


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long for a name, no such home directory, a NUL
        return False


@lru_cache(maxsize=4)
def _secrets_of_command(arguments: tuple[str, ...]) -> frozenset[str]:
    secrets = set[str]()
    for argument, secret in _find_in_command(arguments[1:]):
        secrets.update((secret, *_passwords_in(argument)))
    return frozenset(secret for secret in secrets if len(secret) >= _SHORTEST_VALUE)


def _find_in_command(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each argument with the secret in it, known by the name of its flag or variable; "" if there is none."""
    flag = ""
    for argument in arguments:
        name, is_assigned, value = argument.partition("=")
        is_flag = argument.startswith("-")
        if is_flag:
            flag = name
        if is_secret_name(flag) and not is_flag:
            yield argument, argument
        else:
            yield argument, value if is_assigned and is_secret_name(name) else ""


def _find(value: Any, *, is_secret: bool) -> Iterator[str]:
    """Yield the secrets in a value: entries with their names, and the passwords in URLs."""
    if isinstance(value, str):
        yield from [value] if is_secret else _passwords_in(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find(item, is_secret=is_secret or (isinstance(key, str) and _is_secret(key, item)))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _find(item, is_secret=is_secret)
    elif is_secret and isinstance(value, int) and not isinstance(value, bool):
        yield str(value)


def _passwords_in(text: str) -> Iterator[str]:
    if "://" not in text:  # the search below is slow, and most texts have no URL
        return
    for match in _IN_URL.finditer(text):
        password = match[0].removeprefix(match[1]).removesuffix("@").partition(":")[2]
        yield from {password, unquote(password)} - {""}
