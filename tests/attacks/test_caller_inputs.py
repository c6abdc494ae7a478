"""What people have in hand, given to attacks, to `vitadel.attack`, and to the verbs that take data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

import vitadel
from toys import TinyNet, images
from vitadel.diagnosis import run
from vitadel.diagnosis.run import CHECKS, run_checks
from vitadel.errors import UserError

N, EPS = 24, 8 / 255
X = (images(N) * 255).round() / 255  # of 8 bits, so that files hold them exactly
MODEL = TinyNet().eval()
with torch.no_grad():
    Y = MODEL(X).argmax(1)


class Pairs(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return X[index], int(Y[index])


def photographs(folder):
    for index in range(N):
        place = folder / f"class{int(Y[index])}"
        place.mkdir(exist_ok=True)
        pixels = (X[index] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(place / f"{index:02d}.png")
    return folder


def hugging_face(folder):
    datasets = pytest.importorskip("datasets")
    pictures = [Image.fromarray((each * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()) for each in X]
    return datasets.Dataset.from_dict({"image": pictures, "label": Y.tolist()})


FORMS = {
    "tensors": lambda folder: (X, Y),
    "arrays": lambda folder: (X.numpy(), Y.numpy()),
    "a dataset": lambda folder: Pairs(),
    "a tensor dataset": lambda folder: TensorDataset(X, Y),
    "a loader": lambda folder: DataLoader(Pairs(), batch_size=5),
    "a loader that shuffles": lambda folder: DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True),
    "a path": photographs,
    "a spec": lambda folder: f"folder:{photographs(folder)}",
    "a Hugging Face dataset": hugging_face,
}


@pytest.mark.parametrize("name", ["pgd-3", "fgsm", "apgd-ce", "square(queries=5)", "fab", "targeted:next+pgd-3"])
def test_attacks_take_arrays_and_lists_and_give_what_tensors_give(name):
    attack = vitadel.attacks.make(name, eps=EPS)
    expected = attack(MODEL, X, Y)
    given = [(X.numpy(), Y.numpy()), (X.numpy(), Y.tolist()), (X, Y.int()), (X, Y.numpy().astype(np.uint8))]
    given += [(X.numpy().astype(np.float64), Y.double()), (X.tolist(), Y), (list(X), Y)]
    for x, y in given:
        assert torch.equal(attack(MODEL, x, y), expected)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((X * 255).to(torch.uint8), Y, "got torch.uint8. Convert them: x / 255"),
        ((X.numpy() * 255).astype(np.uint8), Y, "got torch.uint8"),
        (X * 255, Y, "0 to 255. Divide by 255"),
        ((X - 0.5) / 0.25, Y, "they are normalized already"),
        (X.permute(0, 2, 3, 1), Y, "the channels are last"),
        (X.numpy().transpose(0, 2, 3, 1), Y, "the channels are last"),
        (X * torch.nan, Y, "Check how they were loaded"),
        (X, Y[:3], "24 images, 3 labels"),
        (X, Y + 0.5, "whole numbers"),
        (Pairs, Y, "vitadel.attack"),
    ],
)
def test_wrong_inputs_are_one_clear_message(x, y, message):
    with pytest.raises(UserError, match=message):
        vitadel.attacks.PGD(vitadel.attacks.Linf(EPS), steps=2)(MODEL, x, y)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_can_be_attacked_and_audited_with_one_result(form, tmp_path):
    data = FORMS[form](tmp_path)
    found = vitadel.attack(MODEL, data, "pgd-3", eps=EPS)
    assert len(found.images) == N
    order = torch.tensor([int((found.clean[k] - X).abs().flatten(1).amax(1).argmin()) for k in range(N)])
    assert torch.allclose(found.clean, X[order], atol=1e-6)
    assert torch.equal(found.label, Y[order])
    assert float((found.images - found.clean).abs().max()) <= EPS + 1e-6
    with torch.no_grad():
        assert torch.equal(MODEL(found.images).argmax(1), found.prediction)
    assert torch.equal(found.held, found.prediction == found.label)
    results = vitadel.audit(MODEL, data, attacks="pgd-3", eps=EPS)
    assert results["clean"]["correct"] == N
    assert results["attacks"][0]["held"] == int(found.held.sum())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_can_be_diagnosed_and_studied(form, tmp_path, monkeypatch):
    """With the first check only: the others see the same tensors, whatever they came from."""
    (tmp_path / "data").mkdir()
    data, examined = FORMS[form](tmp_path / "data"), []

    def first_check(e):
        examined.append(torch.cat([e.x, *(x for x, _ in e.other_images(N))]))
        return run_checks(e, CHECKS[:1])

    monkeypatch.setattr(run, "run_checks", first_check)
    (finding,) = vitadel.diagnose(MODEL, data, eps=EPS, limit=16)
    assert (finding.check, finding.verdict) == ("pixel-range", "ok")
    (images_and_others,) = examined  # each image once: examined, or left for a student
    distances = (images_and_others[:, None] - X[None]).abs().flatten(2).amax(2)
    assert sorted(distances.argmin(1).tolist()) == list(range(N))
    assert distances.amin(1).max() < 1e-6
    results = vitadel.study("curves", MODEL, data=data, eps=EPS, steps=(1, 2), limit=8, out=tmp_path / "run")
    assert results["data"]["n"] == 8
    assert results["study"]["name"] == "curves"
