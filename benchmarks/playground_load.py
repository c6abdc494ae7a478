"""Does the playground answer many visitors at once, and does its memory stay flat? All attacks go over HTTP.

python benchmarks/playground_load.py [VISITORS] [ATTACKS OF EACH]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass(frozen=True)
class Visitor:
    """A browser's part of Gradio's queue: one page, with its own session."""

    address: str
    session: str

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.address}config", timeout=600).json()
        return found

    def call(self, number: int, data: list[Any]) -> Any:
        """Join the queue for function `number`, and wait for what it returns."""
        sent = {"fn_index": number, "data": data, "session_hash": self.session, "event_data": None}
        joined = httpx.post(f"{self.address}gradio_api/queue/join", json=sent, timeout=600)
        if joined.status_code != 200:
            raise RuntimeError(f"refused with {joined.status_code}: {joined.text[:200]}")
        event = joined.json()["event_id"]
        waiting = {"session_hash": self.session}
        with httpx.stream("GET", f"{self.address}gradio_api/queue/data", params=waiting, timeout=600) as stream:
            for line in (line for line in stream.iter_lines() if line.startswith("data:")):
                message = json.loads(line.removeprefix("data:"))
                if message["msg"] == "process_completed" and message["event_id"] == event:
                    if not message["success"]:
                        raise RuntimeError(f"failed: {message['output']}")
                    return message["output"]["data"]
        raise RuntimeError("the connection ended without an answer")


def function_of(config: dict[str, Any], event: str, elem_id: str | None = None) -> int:
    """The number of the function that an event of a component calls."""
    components = {each["id"]: each["props"].get("elem_id") for each in config["components"]}
    for number, each in enumerate(config["dependencies"]):
        for target, name in each["targets"]:
            if name == event and (elem_id is None or components.get(target) == elem_id):
                return int(each.get("id", number))
    raise LookupError(f"no function for {event} of {elem_id}")


def attack_often(address: str, visitor: str, attacks: int) -> Counter[str]:
    """Choose an image and attack it; how the attacks ended."""
    page = Visitor(address, visitor)
    config = page.config()
    ended: Counter[str] = Counter()
    for row in range(attacks):
        try:
            page.call(function_of(config, "change", "number"), [row])
            form = [None, "zoo:shapes-standard", "pgd-5", "linf", "8/255"]
            (panel,) = page.call(function_of(config, "click", "attack"), form)
            ended["answered" if "data:image" in panel else panel[:300]] += 1
        except (RuntimeError, httpx.HTTPError) as error:
            ended[repr(error)[:300]] += 1
    return ended


def visit_together(address: str, visitors: int, attacks: int) -> Counter[str]:
    with ThreadPoolExecutor(visitors) as pool:
        every = pool.map(lambda number: attack_often(address, f"visitor{number}", attacks), range(visitors))
        return sum(every, Counter())


def resident(process: int) -> float:
    """Resident memory in MB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    visitors, attacks = (int(word) for word in (sys.argv[1:3] + ["50", "10"][len(sys.argv[1:3]) :]))
    command = [sys.executable, "-m", "vitadel", "ui", "--port", "0", "--device", "cpu"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        print(f"{attacks} rounds of {visitors} visitors at once; memory of the server:")
        total: Counter[str] = Counter()
        for row in range(attacks):
            total += visit_together(address, visitors, 1)
            print(f"  {(row + 1) * visitors:>5} attacks: {resident(server.pid):.0f} MB; {dict(total)}", flush=True)
    finally:
        server.terminate()
        server.wait(600)


if __name__ == "__main__":
    main()
