import re
from pathlib import Path

import pytest

from accmt.errors import HyperParameterError
from accmt.options import HyperParameters

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hyper-parameters.md").read_text()


def block(language: str, position: int) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[position]


def test_the_example_of_the_page_is_the_shipped_file_and_the_python_form():
    shipped = (ROOT / "hps" / "example.yaml").read_text()
    assert block("yaml", 0) in shipped
    python = block("python", 0).replace("from accmt import", "from accmt.options import")
    scope: dict[str, HyperParameters] = {}
    exec(python, scope)
    assert scope["hps"] == HyperParameters.from_config(ROOT / "hps" / "example.yaml")


def test_the_error_on_the_page_is_the_real_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hps").mkdir()
    Path("hps/news.yaml").write_text(next(text for text in (block("yaml", i) for i in range(9)) if "bath_size" in text))
    with pytest.raises(HyperParameterError) as caught:
        HyperParameters.from_config("hps/news.yaml")
    assert f"{caught.value}\n" == block("text", 1)
