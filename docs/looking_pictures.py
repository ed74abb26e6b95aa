"""Take the pictures of "Look and debug": `python docs/looking_pictures.py`. Needs Chromium and Pillow."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

from tensordict_lite import DeviceDict, Ragged, Vocabulary

ASSETS = Path(__file__).parent / "assets"
SCHEMES = {"light": ("#fff", "#111"), "dark": ("#111", "#eee")}  # background and text


def shapes() -> DeviceDict:
    """Images of stripes, with a label, a weight and a sequence."""
    torch.manual_seed(0)
    place = torch.arange(48)
    stripes = torch.stack([(place * (i + 2) // 8 % 2 * 200).expand(3, 48, 48) for i in range(64)])
    tint = torch.rand(64, 3, 1, 1) * 0.8 + 0.2
    return DeviceDict(
        {
            "image": (stripes * tint).to(torch.uint8),
            "label": ["wide", "narrow"] * 32,
            "weight": torch.rand(64),
            "ids": Ragged.from_rows([torch.arange(i % 9) for i in range(64)]),
        },
        encoders={"label": Vocabulary(["wide", "narrow"])},
    )


def take(chromium: str, html: str, scheme: str, size: tuple[int, int], target: Path) -> None:
    """A picture of a page. The room that it does not use is cut off."""
    background, color = SCHEMES[scheme]
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        style = f"margin:12px;font-size:13px;background:{background};color:{color}"
        page.write_text(f'<meta charset="utf-8"><body style="{style}">{html}', encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={size[0]},{size[1]}"]
        shot = Path(folder, "shot.png")
        subprocess.run([chromium, *options, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True)
        picture = Image.open(shot).convert("RGB")
        used = Image.eval(
            picture.convert("L"), lambda value: abs(value - (255 if scheme == "light" else 17)) > 8 and 255
        )
        bottom = (used.getbbox() or (0, 0, 0, size[1]))[3]
        picture.crop((0, 0, size[0], min(size[1], bottom + 12))).save(target, optimize=True)


def main() -> None:
    chromium = sys.argv[1] if len(sys.argv) > 1 else "chromium"
    d = shapes()
    html = "<br>".join([d._repr_html_(), d.rows._repr_html_(), d.describe()._repr_html_()])
    for scheme in SCHEMES:
        take(chromium, html, scheme, (860, 1400), ASSETS / f"looking-{scheme}.png")


if __name__ == "__main__":
    main()
