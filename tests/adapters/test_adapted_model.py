"""Models by name, with what was added to them: tokens from a file, or from the run folder of their training."""

from __future__ import annotations

from importlib import resources

import pytest
import safetensors.torch
import torch
import yaml

import vitadel
from toras import enlivened
from toys import images
from vitadel.adapters.adapted_model import open_model, options_for_features, token_run
from vitadel.adapters.tokens.token_classifier import TokenBank, TokenClassifier, fresh_tokens
from vitadel.adapters.tokens.token_files import save_tokens
from vitadel.adapters.tora.tora_files import backbone_of_parts, save_tora
from vitadel.adapters.tora.tora_settings import ToraSettings
from vitadel.adapters.tora.tora_vit import Tora
from vitadel.backbones.checkpoints import write_checksums, zoo_file
from vitadel.backbones.load import load_model, model_names
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import open_target

ZOO = "zoo:shapes-standard"


@pytest.fixture
def run_folder(tmp_path):
    """What a training of tokens leaves behind, as far as opening needs it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"model": {"name": ZOO}, "adapter": {"use": "tokens"}}))
    save_tokens(
        TokenClassifier(load_model(ZOO), fresh_tokens(96, 3, seed=4)), folder / "weights" / "best.safetensors", {}
    )
    return folder


def answers(model):
    with torch.no_grad():
        return model(images(3, side=32))


def test_a_run_folder_is_its_backbone_with_its_tokens(run_folder):
    expected = answers(TokenClassifier(load_model(ZOO), fresh_tokens(96, 3, seed=4)))
    opened = open_model(str(run_folder))
    assert isinstance(opened, TokenClassifier)
    assert not opened.training
    assert torch.equal(answers(opened), expected)
    assert torch.equal(answers(vitadel.open_model(ZOO, tokens=run_folder / "weights" / "best.safetensors")), expected)
    target = open_target(str(run_folder), "shapes")
    assert torch.equal(answers(target.model), expected)
    assert target.model_spec == str(run_folder)
    assert "fingerprint" in target.model.record.notes["tokens"]


def test_other_names_open_as_they_always_did(tmp_path):
    assert torch.equal(answers(open_model(ZOO)), answers(load_model(ZOO)))
    assert token_run(ZOO) is None
    (tmp_path / "recipe.yaml").write_text("model: {name: x}\n")
    assert token_run(str(tmp_path)) is None
    (tmp_path / "recipe.yaml").write_text("[broken")
    assert token_run(str(tmp_path)) is None


def test_tokens_given_twice_are_refused(run_folder):
    with pytest.raises(UserError, match="is a run of tokens with its own adapters"):
        open_model(str(run_folder), tokens="other.safetensors")


def test_readable_token_files_are_refused_unless_allowed(run_folder):
    file = run_folder / "weights" / "best.safetensors"
    file.chmod(0o644)
    with pytest.raises(UserError, match="--allow-readable"):
        open_model(str(run_folder))
    assert isinstance(open_model(str(run_folder), allow_readable=True), TokenClassifier)


@pytest.fixture
def files(tmp_path):
    """Two sets of three tokens, and one of three that go elsewhere."""
    made = []
    for name, seed, placement in (("a", 1, "prefix"), ("b", 2, "prefix"), ("elsewhere", 3, "append")):
        made.append(str(tmp_path / f"{name}.safetensors"))
        save_tokens(TokenClassifier(load_model(ZOO), fresh_tokens(96, 3, seed=seed), placement=placement), made[-1], {})
    return made


def test_several_token_files_are_a_bank(files):
    bank = open_model(ZOO, tokens=f"{files[0]}, {files[1]}")
    assert isinstance(bank, TokenBank)
    assert not bank.training
    assert torch.equal(bank.sets, torch.stack([fresh_tokens(96, 3, seed=seed) for seed in (1, 2)]))
    assert bank.fingerprint == open_model(ZOO, tokens=",".join(files[:2])).fingerprint  # or no run could go on
    assert bank.fingerprint != open_model(ZOO, tokens=",".join(reversed(files[:2]))).fingerprint
    each = torch.stack([answers(open_model(ZOO, tokens=file)) for file in files[:2]])
    drawn = torch.stack([answers(bank) for _ in range(20)])
    near = [(drawn - one).abs().amax(-1) < 1e-4 for one in each]
    assert bool((near[0] ^ near[1]).all())  # every answer is that of one set
    assert bool(near[0].any())
    assert bool(near[1].any())


def test_files_that_make_no_bank_are_reported(files, tmp_path):
    with pytest.raises(
        UserError,
        match=r"must have one placement, but '\S+a\.safe\S+' has prefix, layers \[0\] and '\S+elsewhere\S+ app",
    ):
        open_model(ZOO, tokens=f"{files[0]},{files[2]}")
    with pytest.raises(UserError, match="hold the same tokens: a bank needs different sets"):
        open_model(ZOO, tokens=f"{files[0]},{files[0]}")
    with pytest.raises(UserError, match=r"secret file 'nowhere\.safetensors' does not exist"):
        open_model(ZOO, tokens=f"{files[0]},nowhere.safetensors")
    odd = tmp_path / "one,name.safetensors"
    save_tokens(TokenClassifier(load_model(ZOO), fresh_tokens(96, 3, seed=4)), odd, {})
    assert isinstance(open_model(ZOO, tokens=odd), TokenClassifier)


def test_features_need_no_head():
    dino = "vit_small_patch14_dinov2.lvd142m"
    assert options_for_features(ZOO, {"num_classes": None}) == {"num_classes": None}
    assert options_for_features(dino, {})["new_head"]
    kwargs = {"img_size": 28, "embed_dim": 24, "depth": 1, "num_heads": 3}
    model = open_model(dino, {**options_for_features(dino, {}), "weights": "random", "kwargs": kwargs})
    assert model.record.num_classes == 2


def test_a_stand_in_head_is_the_same_every_time():
    """Runs are known by the weights of their models, and go on in another process."""
    dino = "vit_small_patch14_dinov2.lvd142m"
    kwargs = {"img_size": 28, "embed_dim": 24, "depth": 1, "num_heads": 3}
    heads = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        opened = open_model(dino, {**options_for_features(dino, {}), "weights": "random", "kwargs": kwargs})
        assert torch.equal(torch.random.get_rng_state(), before)
        heads.append(opened.backbone.head.weight)
    assert torch.equal(*heads)


def test_a_backbone_from_a_weight_file_keeps_the_classes_of_its_recipe(tmp_path):
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    name = "deit_tiny_patch16_224"  # of 1,000 classes, by default
    model = load_model(name, weights="random", num_classes=5, kwargs=small)
    file = tmp_path / "five.safetensors"
    safetensors.torch.save_file(model.backbone.state_dict(), file)
    folder = tmp_path / "run"
    (folder / "weights").mkdir(parents=True)
    about = {"name": name, "weights": str(file), "num_classes": 5, "kwargs": small}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"model": about, "adapter": {"use": "tokens"}}))
    save_tokens(TokenClassifier(model, fresh_tokens(24, 2, seed=1)), folder / "weights" / "best.safetensors", {})
    assert torch.equal(
        answers(open_model(str(folder))), answers(TokenClassifier(model.eval(), fresh_tokens(24, 2, seed=1)))
    )


@pytest.fixture
def zoo_of_tora(tmp_path, monkeypatch):
    """A package folder with a standard model and a TORA on it, with its card."""
    with zoo_file(ZOO) as path:
        standard = path.read_bytes()
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "shapes-standard.safetensors").write_bytes(standard)
    tora = enlivened(Tora(load_model(ZOO), ToraSettings()))
    save_tora(tora, tmp_path / "zoo" / "shapes-two.safetensors", {"model": ZOO})
    (tmp_path / "zoo" / "shapes-two.md").write_text("# zoo:shapes-two\n\nTwo adapters a block.\n\n- more\n")
    write_checksums(tmp_path / "zoo")
    monkeypatch.setattr(resources, "files", lambda _package: tmp_path)
    return tora.eval()


def test_the_zoo_may_hold_a_backbone_with_adapters(zoo_of_tora):
    opened = open_model("zoo:shapes-two")
    assert isinstance(opened, Tora)
    assert not opened.training
    assert torch.equal(answers(opened), answers(zoo_of_tora))
    assert not torch.equal(answers(opened), answers(load_model(ZOO)))
    assert model_names()["zoo:shapes-two"] == "Two adapters a block."


def test_where_a_backbone_is_needed_such_a_model_is_refused(zoo_of_tora):
    with pytest.raises(UserError, match=r"'zoo:shapes-two' is a backbone with adapters.*open_model"):
        load_model("zoo:shapes-two")
    with pytest.raises(UserError, match="is a backbone with adapters"):
        open_model("zoo:shapes-two", tokens="some.safetensors")


def test_a_parts_file_names_its_backbone_if_given(tmp_path):
    tora = Tora(load_model(ZOO), ToraSettings())
    save_tora(tora, tmp_path / "named.safetensors", {"model": ZOO})
    save_tora(tora, tmp_path / "unnamed.safetensors")
    assert backbone_of_parts(tmp_path / "named.safetensors") == ZOO
    assert backbone_of_parts(tmp_path / "unnamed.safetensors") is None
    with zoo_file(ZOO) as path:
        assert backbone_of_parts(path) is None


def test_a_run_with_a_head_for_other_classes_has_the_size_it_was_trained_with(tmp_path):
    """As on a backbone of ImageNet-21k, whose own head of 21,843 classes was replaced before the training."""
    trained = Tora(load_model(ZOO, num_classes=7, new_head=True), ToraSettings())
    (tmp_path / "weights").mkdir()
    save_tora(trained, tmp_path / "weights" / "best.safetensors")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": {"name": ZOO}, "adapter": {"use": "tora"}}))
    opened, again = open_model(str(tmp_path)), open_model(str(tmp_path))
    assert sum(each.numel() for each in opened.parameters()) == sum(each.numel() for each in trained.parameters())
    assert opened.record.num_classes == 7
    assert all(torch.equal(one, other) for one, other in zip(opened.parameters(), again.parameters(), strict=True))
