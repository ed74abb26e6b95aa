"""The notebooks hold their outputs, and give the same outputs today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))


def outputs(notebook: dict[str, Any]) -> list[list[str]]:
    """What each cell of code printed and returned, as text."""
    found: list[list[str]] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            texts = [one["text"] if "text" in one else one["data"]["text/plain"] for one in cell["outputs"]]
            found.append([text if isinstance(text, str) else "".join(text) for text in texts])
    return found


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["get_started", "rows_and_tables"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_dicts_as_tables(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shown = [output["data"] for cell in code for output in cell["outputs"] if "data" in output]
    tables = [data for data in shown if "".join(data["text/plain"]).startswith("DeviceDict(")]
    assert len(tables) >= 2
    assert all("<table" in "".join(data["text/html"]) for data in tables)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Jupyter, in this process; the kernel has its own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_its_outputs_again(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient: Any = pytest.importorskip("nbclient", reason="needs nbclient, which executes notebooks")
    pytest.importorskip("ipykernel", reason="needs ipykernel, which executes notebooks")
    nbformat: Any = pytest.importorskip("nbformat", reason="needs nbformat, which reads notebooks")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the outputs are those of the CPU
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    committed = json.loads(path.read_text(encoding="utf-8"))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3", resources=resources).execute()
    assert outputs(notebook) == outputs(committed)
