"""`logits:FACTOR+`: what a factor on the logits changes and what it cannot change."""

from __future__ import annotations

import pytest
import torch

from toys import TinyNet, images
from vitadel.attacks import make
from vitadel.errors import UserError


class Confident(torch.nn.Module):
    """Logits so large that the softmax of the cross-entropy has no gradient in float32."""

    def __init__(self, net: torch.nn.Module, times: float) -> None:
        super().__init__()
        self.net, self.times = net, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.times


def test_it_undoes_large_logits() -> None:
    """The attack on logits times 1e6 through a factor of 1e-6 is the attack on the original, image for image."""
    torch.manual_seed(0)
    net, x = TinyNet().eval(), images(6)
    with torch.no_grad():
        y = net(x).argmax(1)
    plain = make("pgd-5", eps=8 / 255)(net, x, y)
    hidden = Confident(net, 2.0**20)
    assert torch.equal(make(f"logits:{2.0**-20}+pgd-5", eps=8 / 255)(hidden, x, y), plain)
    assert not torch.equal(make("pgd-5", eps=8 / 255)(hidden, x, y), plain)


def test_the_margin_needs_no_factor() -> None:
    net, x = TinyNet().eval(), images(4)
    with torch.no_grad():
        y = net(x).argmax(1)
    assert torch.equal(make("logits:0.25+cw-5")(net, x, y), make("cw-5")(net, x, y))
    assert make("logits:0.25+cw-5").passes() == make("cw-5").passes()


@pytest.mark.parametrize("factor", ["0", "-1"])
def test_wrong_factors(factor: str) -> None:
    with pytest.raises(UserError, match="positive"):
        make(f"logits:{factor}+pgd-5")
