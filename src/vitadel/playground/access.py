"""Which requests the page answers: those under its own address, not those of other pages (DNS rebinding)."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_REFUSED = b"This page is only served under the address that `vitadel ui` printed."


@dataclass(frozen=True)
class OnlyThisPage:
    """ASGI middleware: on a loopback address, requests whose Host or Origin is another name are refused with 403.

    A page elsewhere can make a browser call 127.0.0.1, or let its own name point there; both show in these headers.
    A server that listens on other addresses is meant to be reached under names that are not known here.
    """

    app: App
    host: str

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and is_loopback(self.host) and not _is_local(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": _REFUSED})
            return
        await self.app(scope, receive, send)


def _is_local(scope: Message) -> bool:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    addresses = [f"//{headers.get('host', '')}", *([headers["origin"]] if "origin" in headers else [])]
    try:
        return all(is_loopback(urlsplit(address).hostname) for address in addresses)
    except ValueError:  # malformed
        return False


def is_loopback(host: str | None) -> bool:
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
