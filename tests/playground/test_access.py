"""Requests with a foreign Host or Origin are refused on loopback."""

from __future__ import annotations

import asyncio

import pytest

from vitadel.playground.access import OnlyThisPage


def status(listening_on: str, **headers: str) -> int:
    async def page(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(OnlyThisPage(page, listening_on)({"type": "http", "headers": raw}, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize("name", ["127.0.0.1:7860", "localhost:7860", "[::1]:7860", "127.0.0.2"])
def test_the_page_itself_is_served(name):
    assert status("127.0.0.1", host=name) == 200
    assert status("127.0.0.1", host=name, origin=f"http://{name}") == 200


@pytest.mark.parametrize("name", ["evil.example:7860", "evil.example", "", "[::", "127.0.0.1.evil.example", "10.0.0.1"])
def test_other_hosts_and_origins_are_refused(name):
    assert status("127.0.0.1", host=name) == 403
    assert status("::1", host="localhost", origin=f"http://{name}") == 403
    assert status("127.0.0.1", host="localhost", origin="null") == 403


def test_a_server_for_others_is_reached_under_any_name():
    assert status("0.0.0.0", host="lab.example", origin="http://lab.example") == 200
