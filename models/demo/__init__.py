"""The small trained target and drafter that ship: where they lie, and prompts that they never saw."""

import json
import pathlib

_FOLDER = pathlib.Path(__file__).parent

#: Folders in the layout of the published Kimi K2.6 and of its DFlash drafter.
TARGET = _FOLDER / "target"
DRAFTER = _FOLDER / "drafter"


def prompts() -> list[str]:
    """Beginnings of files from modules that were held out of the training."""
    lines = (_FOLDER / "prompts.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["prompt"] for line in lines if line]
