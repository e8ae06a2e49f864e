"""Print a training script and its hyper-parameters as a starting point, or write them to a folder.

The script learns to classify handwritten digits within seconds, and needs scikit-learn. No file is overwritten.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from accmt.errors import ArgumentError, fail

FILES = Path(__file__).with_name("example_files")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", help="the folder to write to; default: print to the terminal")


def run(options: argparse.Namespace) -> int:
    files = {path.name.removesuffix(".txt"): path.read_text(encoding="utf-8") for path in sorted(FILES.iterdir())}
    if options.folder is None:
        print("\n".join(files.values()), end="")
        return 0
    there = [name for name in files if (options.folder / name).exists()]
    if there:
        got, do = f"a folder with {', '.join(there)}", "choose another folder"
        raise fail(
            ArgumentError, f"accmt example {options.folder}", got=got, expected="a folder without these files", do=do
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (options.folder / name).write_text(text, encoding="utf-8")
    print(f"written: {', '.join(str(options.folder / name) for name in files)}")
    return 0
